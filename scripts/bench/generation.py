"""Speed of generate(): `python -m scripts.bench.generation` times it beside transformers' in one process.

One GPT of GPT-2 124M's shape with random weights, in the dtype of the run, three times:

    gpt                   ours; on CUDA a step is one graph
    transformers          ArceeForCausalLM, which has our architecture, with the same weights; its default generate()
    transformers_static   the same with cache_implementation="static", which compiles its step on CUDA

A row is a call of generate(), with medians over some rounds in which all take turns: tokens a second of the whole call
and after the first token of each prompt; milliseconds to the first token and of a step (transformers reports nothing
between steps: its step is the mean over all, prefill included); memory beyond the weights at the fullest moment of the
first call; and, for a step of ours, copies from the device and waits of the host, counted by PyTorch's profiler. Rows
of one new token measure prefill, beside the model's plain forward of the same tokens. The program first shows that both
are the same model: the largest difference of logits and the share of greedy tokens that are equal (in 16 bits ties make
some differ).

transformers is no dependency: `uv run --group hf python -m scripts.bench.generation`. Without it ours are timed alone.
The last line is one JSON object.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from conf.program import program
from model import GPT, GPTConfig, generate, resolve_model
from model.embedding import embed
from model.gpt import norm
from model.huggingface_weights import config_json, tensors
from scripts.bench.clock import p99, peak_gib
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, refuse_unknown, set_up_gpu, table
from training.hardware import HardwareConfig

OURS = "gpt"
PEERS = {"transformers": {}, "transformers_static": {"cache_implementation": "static"}}
CHOICES = {"greedy": {"temperature": 0.0}, "top_k 200, 0.8": {"temperature": 0.8, "top_k": 200}}  # the peers': greedy
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # CUDA's functions in which the host waits
UNCOUNTED_STEPS, COUNTED_STEPS = 8, 16  # of a call whose copies and waits are counted
MOST_APART = 0.05  # of the largest logit: two bfloat16 models differ by 0.01, others by 1
SMOKE = (
    "model.num_layers=1 model.num_heads=2 model.n_embd=32 bench.batch=[2] bench.prompt_tokens=16 bench.new_tokens=8 "
    "bench.prefill_batch=2 bench.prefill_tokens=32 bench.rounds=1 bench.vocab_size=256"
)

Prompts = list[list[int]]
Marks = list[float]  # seconds: the beginning of a call, then each moment at which tokens were on the host


@dataclass
class BenchConfig:
    which: list[str] = field(default_factory=lambda: [OURS, *PEERS])  # gpt | transformers | transformers_static
    batch: list[int] = field(default_factory=lambda: [1, 64])  # prompts
    prompt_tokens: int = 256  # of each
    new_tokens: int = 256  # that follow each
    prefill_batch: int = 8  # prompts that are read and continued by one token
    prefill_tokens: int = 4096  # of each
    rounds: int = 5  # in which all take turns, after a first call each; medians count
    vocab_size: int = 50304  # GPT-2's 50,257, padded for both to a size with fast products

    def __post_init__(self) -> None:
        refuse_unknown("bench.", self, which=(OURS, *PEERS))
        sizes = "batch", "prompt_tokens", "new_tokens", "prefill_batch", "prefill_tokens", "rounds", "vocab_size"
        refuse_out_of_range("bench.", self, *sizes)


@dataclass
class BenchSettings:
    bench: BenchConfig = field(default_factory=BenchConfig)
    model: GPTConfig = field(default_factory=GPTConfig)  # GPT-2 124M's sizes; gelu or relu2, as ArceeForCausalLM has
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


@program("tool", BenchSettings, run_dir="runs/bench_generation")
@torch.no_grad()
def main(settings: BenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("generate()", settings.hardware, SMOKE)
    bench = settings.bench
    if settings.model.name is not None:
        raise ValueError(f"model.name={settings.model.name} is no GPT of ours, which is what is timed; leave it out")
    device = hardware.device
    report = Report("bench_generation", run_dir, hardware.description)
    config, *_ = resolve_model(settings.model, device, hardware.dtype)
    seq_len = max(bench.prompt_tokens + bench.new_tokens, bench.prefill_tokens + 1)
    drawn = torch.Generator().manual_seed(0)
    model = GPT(config, bench.vocab_size, seq_len, device=device, generator=drawn).for_inference(hardware.dtype)
    peer = load_peer(model) if set(bench.which) & PEERS.keys() else None
    which = [name for name in bench.which if name == OURS or peer is not None]
    said = "Ours alone."
    if not which:
        raise ValueError(f"bench.which={bench.which} needs transformers; begin with `uv run --group hf`")
    if peer is not None:
        report.more = same_model(model, peer, prompts_of(bench, 4, min(64, bench.prompt_tokens)))
        said = TITLE.format_map(report.more)

    def caller(name: str, choice: str) -> Callable[[Prompts, int], Marks]:
        if name == OURS:
            return partial(call_ours, model, CHOICES[choice])
        return partial(call_peer, peer, PEERS[name])

    for batch, choice in product(bench.batch, CHOICES):
        prompts = prompts_of(bench, batch, bench.prompt_tokens)
        calls = {name: caller(name, choice) for name in which if name == OURS or choice == "greedy"}
        for name, row in rounds(calls, prompts, bench.new_tokens, bench.rounds, device).items():
            if name == OURS and device.type == "cuda":
                row |= counted(partial(steps_of, model, CHOICES[choice], prompts, bench.new_tokens))
            report.add({"model": name, "choice": choice, **row})

    prompts = prompts_of(bench, bench.prefill_batch, bench.prefill_tokens)
    calls = {name: caller(name, "greedy") for name in which if name in (OURS, "transformers")}
    calls["forward"] = partial(call_forward, model)
    rows = rounds(calls, prompts, 1, bench.rounds, device)
    for name, row in rows.items():
        row["of_forward"] = row["first_ms"] / rows["forward"]["first_ms"]
        report.add({"model": name, "choice": "reading", **row})
    report.finish(table(report.rows, NAMES, FIGURES, "generate()", f"{said} {CAPTION}"))


TITLE = (
    "With the same weights transformers {transformers} gives logits {logits_apart:.1e} of the largest apart, and "
    "{equal_tokens:.1%} of {tokens} greedy tokens are equal."
)
CAPTION = (
    "Of steps: after the first token of each prompt; of transformers, which reports nothing between steps, of the "
    "whole call. Copies and waits: of the host, a step. / forward: the time over that of the model's plain forward."
)
NAMES: Columns = {
    "model": "{model}",
    "choice": "{choice}",
    "prompts": "{batch} x {prompt_tokens:,}",
    "new": "{new_tokens}",
}
FIGURES: Columns = {
    "tokens/s": "{tokens_per_second:,.0f}", "of steps": "{tokens_per_second_after:,.0f}",
    "first, ms": "{first_ms:.2f}", "step, ms": "{step_ms:.3f}", "p99": "{step_p99_ms:.3f}", "GiB": "{extra_gib:.2f}",
    "copies": "{copies_per_step:.2f}", "waits": "{waits_per_step:.2f}", "/ forward": "{of_forward:.2f}",
}  # fmt: skip


def prompts_of(bench: BenchConfig, batch: int, tokens: int) -> Prompts:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(bench.vocab_size, (batch, tokens), generator=drawn).tolist()


# --- calls


def steps_of(model: GPT, options: dict[str, Any], prompts: Prompts, new_tokens: int) -> Iterator[Any]:
    return generate(model, prompts, max_new_tokens=new_tokens, batch_size=len(prompts), **options)


def call_ours(model: GPT, options: dict[str, Any], prompts: Prompts, new_tokens: int) -> Marks:
    marks = [time.perf_counter()]
    marks += [time.perf_counter() for _ in steps_of(model, options, prompts, new_tokens)]
    return marks


def call_peer(peer: Any, options: dict[str, Any], prompts: Prompts, new_tokens: int) -> Marks:
    begin = time.perf_counter()
    continued_by(peer, prompts, new_tokens, **options)
    return [begin, time.perf_counter()]


def call_forward(model: GPT, prompts: Prompts, new_tokens: int) -> Marks:
    begin = time.perf_counter()
    last_logits(model, torch.tensor(prompts, device=model.embedding.weight.device)).argmax(-1).tolist()
    return [begin, time.perf_counter()]


def last_logits(model: GPT, tokens: Tensor) -> Tensor:
    """The least work of prefill: the network, and the head at each prompt's last token. Returns (B, vocab_size)."""
    x = embed(tokens, model.embedding.weight)
    for block in model.blocks:
        x = block(x, model.cos[: tokens.size(1)], model.sin[: tokens.size(1)])
    table = model.embedding.weight if model.head is None else model.head.weight
    return F.linear(norm(x[:, -1]), table)[:, : model.vocab_size]


# --- figures


def rounds(
    calls: dict[str, Callable[[Prompts, int], Marks]], prompts: Prompts, new_tokens: int, number: int,
    device: torch.device,
) -> dict[str, Row]:  # fmt: skip
    """A row of figures for each call, over `number` rounds in which they take turns, after a first call of each."""
    sizes = {"batch": len(prompts), "prompt_tokens": len(prompts[0]), "new_tokens": new_tokens}
    peaks = {name: peak_gib(partial(call, prompts, new_tokens), device) for name, call in calls.items()}
    rows: dict[str, Row] = {name: sizes | {"extra_gib": peak} for name, peak in peaks.items()}
    wholes, firsts, steps = ({name: [] for name in calls} for _ in range(3))  # seconds
    for _, (name, call) in product(range(number), calls.items()):
        begin, *marks = call(prompts, new_tokens)
        wholes[name].append(marks[-1] - begin)
        if len(marks) == new_tokens:
            firsts[name].append(marks[0] - begin)
            steps[name] += [later - earlier for earlier, later in pairwise(marks)]
        else:  # it reports nothing between steps
            steps[name].append(wholes[name][-1] / new_tokens)
    for name, row in rows.items():
        row["tokens_per_second"] = len(prompts) * new_tokens / statistics.median(wholes[name])
        if firsts[name]:
            row["first_ms"] = 1e3 * statistics.median(firsts[name])
        if steps[name]:
            row["step_ms"] = 1e3 * statistics.median(steps[name])
            row["tokens_per_second_after"] = 1e3 * len(prompts) / row["step_ms"]
        if len(steps[name]) > number:
            row["step_p99_ms"] = 1e3 * p99(steps[name])
    return rows


def counted(begin: Callable[[], Iterator[Any]]) -> Row:
    """Copies from the device and waits for it in a step, by PyTorch's profiler; {} for a call with too few steps."""
    steps = begin()
    for _ in range(UNCOUNTED_STEPS):
        next(steps, None)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        done = sum(next(steps, None) is not None for _ in range(COUNTED_STEPS))
    steps.close()
    names = Counter(event.name for event in watched.events())
    if done < COUNTED_STEPS:
        return {}
    copies = sum(number for name, number in names.items() if name.startswith("Memcpy DtoH"))
    return {"copies_per_step": copies / done, "waits_per_step": sum(names[name] for name in WAITS) / done}


# --- the peer


def load_peer(model: GPT) -> Any:
    """`model` in transformers, with its weights; None, with a printed line, where transformers is not installed."""
    try:
        from transformers import ArceeConfig, ArceeForCausalLM
    except ImportError as error:
        print(f"transformers cannot be imported ({error}): ours alone; `uv run --group hf` brings it")
        return None
    config = model.config
    if config.mlp == "swiglu" or config.qk_norm or config.window:
        raise ValueError(
            f"ArceeForCausalLM has no model.mlp={config.mlp}, model.qk_norm={config.qk_norm}, "
            f"model.window={config.window}; use gelu or relu2, false and null, or bench.which=[gpt]"
        )
    weight = model.embedding.weight
    peer = ArceeForCausalLM(ArceeConfig.from_dict(config_json(model))).to(weight.device).eval()
    for parameter in peer.parameters():  # not its table of frequencies, which bfloat16 would spoil
        parameter.data = parameter.data.to(weight.dtype)
    missing, unexpected = peer.load_state_dict(tensors(model), strict=False)
    if unexpected or missing != (["lm_head.weight"] if config.tie_embeddings else []):  # tied, it is the embedding
        raise RuntimeError(f"transformers' ArceeForCausalLM has other weights: {unexpected or missing}")
    return peer


def continued_by(peer: Any, prompts: Prompts, new_tokens: int, **options: Any) -> Prompts:
    """Greedy tokens, on the host."""
    tokens = torch.tensor(prompts, device=peer.device)
    asked = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": new_tokens, "do_sample": False}
    found = peer.generate(tokens, **asked, **options)
    return found[:, tokens.size(1) :].tolist()


def same_model(model: GPT, peer: Any, prompts: Prompts) -> dict[str, Any]:
    """The largest difference of logits over the largest logit, and the share of equal greedy tokens.

    Raises RuntimeError where the peer is another model.
    """
    tokens = torch.tensor(prompts, device=model.embedding.weight.device)
    ours, theirs = model(tokens).float(), peer(tokens).logits.float()
    apart = ((ours - theirs).abs().max() / ours.abs().max()).item()
    if not apart < MOST_APART:
        raise RuntimeError(f"transformers' logits are {apart:.2g} of the largest apart: it is another model")
    count = tokens.size(1)
    drawn: Prompts = [[] for _ in prompts]
    for step in steps_of(model, CHOICES["greedy"], prompts, count):
        for sequence, token in step:
            drawn[sequence].append(token)
    theirs = continued_by(peer, prompts, count)
    equal = [a == b for rows in zip(drawn, theirs, strict=True) for a, b in zip(*rows, strict=True)]
    return {
        "transformers": version("transformers"),
        "logits_apart": apart,
        "tokens": len(equal),
        "equal_tokens": sum(equal) / len(equal),
    }


if __name__ == "__main__":
    main()
