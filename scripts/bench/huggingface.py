"""Our attention in a model of transformers beside theirs: `python -m scripts.bench.huggingface` (needs a GPU and the
group hf).

Llama-3.2-1B's sizes with random weights: `prefill` reads prompts into a cache, `decode` is a token of a batch whose
prompts are padded on the left, `step` forward and backward of training. `gpt_triton` is model/huggingface.py.
`flash_attention_2` is transformers' flash path; without the package flash-attn it runs over the FlashAttention-2 that
PyTorch brings along, and each row says which it was. The last line is one JSON object.
"""

import statistics
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from conf.program import program
from scripts.bench.clock import failures_as_rows, laps, p99, token_throughput
from scripts.bench.report import Columns, Report, refuse_out_of_range, refuse_unknown, set_up_gpu, table
from training.hardware import HardwareConfig

LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FLASH = "flash_attention_2"
SMOKE = (
    "prompts=1 prompt_tokens=32 decode_rows=2 decode_context=32 new_tokens=4 '+sizes={vocab_size:100,hidden_size:32,"
    "intermediate_size:32,num_hidden_layers:1,num_attention_heads:2,num_key_value_heads:1,head_dim:16}'"
)


@dataclass
class HuggingFaceBenchSettings:
    attention: list[str] = field(default_factory=lambda: ["gpt_triton", "sdpa", FLASH])  # their names
    parts: list[str] = field(default_factory=lambda: [*PARTS])  # prefill | decode | step
    prompts: int = 4  # of prefill, and sequences of a step
    prompt_tokens: int = 4096  # of each of them
    decode_rows: int = 16  # of decode
    decode_context: int = 2048  # of its longest prompt; the others have half of it and more
    new_tokens: int = 40  # that decode is measured over
    sizes: dict[str, int] = field(default_factory=dict)  # other sizes of the model, by their names
    budget_ms: float = 3000.0  # of measuring, each
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        refuse_unknown("", self, parts=PARTS)
        sizes = "prompts", "prompt_tokens", "decode_rows", "decode_context", "new_tokens"
        refuse_out_of_range("", self, *sizes, "budget_ms")


@program("tool", HuggingFaceBenchSettings, run_dir="runs/bench_huggingface")
def main(settings: HuggingFaceBenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("a model of transformers", settings.hardware, SMOKE)
    with hardware.device:
        model = build(settings).to(hardware.dtype)
    report = Report("bench_huggingface", run_dir, hardware.description, more={"sizes": LLAMA_1B | settings.sizes})
    for part in settings.parts:
        for name in settings.attention:
            row = {"part": part, "attention": name}
            with failures_as_rows(row, ImportError):
                row["kernels"] = choose(model, name, hardware.device)
                row |= PARTS[part](model, settings, hardware.device)
            report.add(row)
            model.zero_grad()
    report.finish(table(report.rows, NAMES, FIGURES, TITLE, CAPTION))


TITLE = "Llama-3.2-1B's sizes, random weights"
CAPTION = "Rows are measured one after the other; a figure moves by up to 4 % with its place."
NAMES: Columns = {"part": "{part}", "attention": "{attention}", "its kernels": "{kernels}"}
FIGURES: Columns = {
    "ms": "{ms:.2f}",
    "p99": "{p99_ms:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "GiB": "{peak_gib:.2f}",
}


def build(settings: HuggingFaceBenchSettings) -> Any:
    """Build the model, and register our attention under its name."""
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError as error:
        raise ValueError(f"transformers cannot be imported ({error}); `uv run --group hf` brings it") from error

    import model.huggingface  # noqa: F401  (registers gpt_triton)

    torch.manual_seed(0)
    try:
        config = transformers.LlamaConfig(**LLAMA_1B | settings.sizes)
    except StrictDataclassError as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"sizes={settings.sizes} are no Llama's ({why}); use others") from error
    return transformers.LlamaForCausalLM(config)


def choose(model: Any, name: str, device: torch.device) -> str:
    """Set the model's attention and return which kernels it runs. Raises ImportError where there are none."""
    if name != FLASH:
        model.set_attn_implementation(name)
        return {"gpt_triton": "ours", "sdpa": "PyTorch's choice"}.get(name, "its own")
    try:
        model.set_attn_implementation(name)
        return f"flash-attn {metadata.version('flash-attn')}"
    except ImportError:
        if device.type != "cuda":
            raise ImportError("FlashAttention-2 needs a GPU") from None
    lend_kernels()
    model.config._attn_implementation = name  # past the check that found no package
    return f"FlashAttention-2 of PyTorch {torch.__version__.partition('+')[0]}"


def lend_kernels() -> None:
    """Put `pytorch_flash` where transformers' flash path would keep the functions of flash-attn."""
    from transformers import modeling_flash_attention_utils as flash

    flash._loaded_implementation, flash._flash_fn, flash._flash_varlen_fn = FLASH, pytorch_flash, pytorch_flash
    flash._pad_fn, flash._unpad_fn = flash._pad_input, flash._unpad_input
    flash._process_flash_kwargs_fn = flash._lazy_define_process_function(pytorch_flash)


def pytorch_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """PyTorch's own FlashAttention-2 by flash-attn's arguments: q, k, v (B, N, H, D), or (tokens, H, D) packed."""
    longest = max_seqlen_q or q.shape[1], max_seqlen_k or k.shape[1]
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, causal, False, scale=softmax_scale
    )[0]


def tokens(model: Any, rows: int, length: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, model.config.vocab_size, (rows, length), generator=generator).to(device)


def prefill(model: Any, settings: HuggingFaceBenchSettings, device: torch.device) -> dict:
    """Prompts with a mask of 1s, as generate() passes it; logits of the last token."""
    model.eval()
    ids = tokens(model, settings.prompts, settings.prompt_tokens, device)
    mask = torch.ones_like(ids)

    def call() -> None:
        with torch.no_grad():
            model(ids, attention_mask=mask, logits_to_keep=1, use_cache=True)

    return token_throughput(call, ids.numel(), device, settings.budget_ms)


def step(model: Any, settings: HuggingFaceBenchSettings, device: torch.device) -> dict:
    """Forward and backward, without the optimizer."""
    model.train()
    ids = tokens(model, settings.prompts, settings.prompt_tokens, device)

    def call() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return token_throughput(call, ids.numel(), device, settings.budget_ms)


def decode(model: Any, settings: HuggingFaceBenchSettings, device: torch.device) -> dict:
    """A token of each row, prompts of different lengths, transformers' growing cache; the host's time counts.

    The second of two passes counts: the first one requests memory for caches of all these lengths from the driver.
    """
    model.eval()
    rows, context = settings.decode_rows, settings.decode_context
    ids = tokens(model, rows, context, device)
    pads = torch.linspace(0, context // 2, rows, device=device).long()[:, None]
    mask = (torch.arange(context, device=device) >= pads).long()

    def one_token() -> None:
        nonlocal found, seen
        new = found.logits[:, -1:].argmax(-1)
        seen = torch.cat((seen, seen[:, -1:]), dim=1)
        positions = seen.sum(1, keepdim=True) - 1
        found = model(new, attention_mask=seen, position_ids=positions, past_key_values=found.past_key_values)

    for _ in range(2):
        with torch.no_grad():
            seen, found = mask, model(ids, attention_mask=mask, logits_to_keep=1, use_cache=True)
            times = [1e3 * seconds for seconds in laps(one_token, device, 3, settings.new_tokens)]
    ms = statistics.median(times)
    return {"ms": ms, "p99_ms": p99(times), "tokens_per_second": 1e3 * rows / ms}


PARTS = {"prefill": prefill, "decode": decode, "step": step}

if __name__ == "__main__":
    main()
