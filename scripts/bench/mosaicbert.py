"""DNABERT-2's network over long sequences: `python -m scripts.bench.mosaicbert` times padded and full batches.

`naive` is its own PyTorch path, `sdpa` PyTorch's attention with its dense bias, `flash` the same model after
`model.mosaicbert.patch`. `free` is the latter with values in place of attention: no attention can be faster.
Weights are random, code and sizes those of scripts/mosaicbert.py. The parts:

    attention        one layer's attention alone, from q, k, v on; the dense ways have them padded already
    attention_step   with the gradients of q, k, v
    forward          of the whole network
    step             forward and backward of the whole network, as in fine-tuning, without the optimizer

Rows of a `padded` batch have between an eighth and all of seq_len tokens, as DNA reads have; only those count. A batch
of one row is full. The picture has forwards and steps of padded batches; all parts, and full batches beside padded
ones, are timed at one length. The last line is one JSON object.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.program import program
from kernels import flash_attention_varlen
from model.mosaicbert import alibi_slopes, patch
from scripts.bench.clock import failures_as_rows, token_throughput
from scripts.bench.report import (
    Columns,
    Panel,
    Report,
    Row,
    draw_lengths,
    refuse_out_of_range,
    refuse_unknown,
    set_up_gpu,
    table,
)
from scripts.mosaicbert import BertModel, dnabert2_config
from training.hardware import HardwareConfig

ATTENTION = ("naive", "sdpa", "flash", "free")
NETWORK = ("forward", "step")
PARTS = ("attention", "attention_step", *NETWORK)
SMOKE = "seq_len=[16] batch_tokens=16 num_layers=1"


@dataclass
class MosaicBertBenchSettings:
    seq_len: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192, 16384])  # of a batch's longest row
    attention: list[str] = field(default_factory=lambda: list(ATTENTION))  # naive | sdpa | flash | free
    all_parts_at: int = 4096  # seq_len at which all parts are timed, full and padded
    batch_tokens: int = 16384  # padding included; one row at least
    num_layers: int = 12  # DNABERT-2's
    budget_ms: float = 1000.0  # of measuring, each
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        refuse_unknown("", self, attention=ATTENTION)
        refuse_out_of_range("", self, "seq_len", "all_parts_at", "batch_tokens", "num_layers", "budget_ms")

    def rows(self, seq_len: int) -> int:
        """Rows of a batch."""
        return max(1, self.batch_tokens // seq_len)


@program("tool", MosaicBertBenchSettings, run_dir="runs/bench_mosaicbert")
def main(settings: MosaicBertBenchSettings, run_dir: Path) -> None:
    hardware = set_up_gpu("DNABERT-2's network", settings.hardware, SMOKE)
    report = Report("bench_mosaicbert", run_dir, hardware.description)
    for seq_len, lengths in cases(settings):
        ids, mask = batch(seq_len, settings.rows(seq_len), lengths)
        ids, mask, tokens = ids.to(hardware.device), mask.to(hardware.device), int(mask.sum())
        for name, model in models(settings, seq_len, hardware.device):
            model = model.to(hardware.dtype)
            model.encoder.alibi = model.encoder.alibi.to(hardware.dtype)  # no layer has to cast it
            for part in parts(name, seq_len == settings.all_parts_at):
                row = {"part": part, "lengths": lengths, "attention": name, "seq_len": seq_len, "rows": len(ids)}
                row["tokens"] = tokens
                with failures_as_rows(row):
                    call = prepare(part, name, model, ids, mask)
                    network = part in NETWORK  # attention alone ends before a slow host has queued all of it
                    row |= token_throughput(
                        call, tokens, hardware.device, settings.budget_ms, runs=200, with_host=network
                    )
                report.add(row)
                call = None  # it holds on to its tensors
            del model
    add_ratios(report.rows)
    title = f"{settings.num_layers} layers, 12 heads of 64, ALiBi"
    drawn = [row for row in report.rows if row["part"] in NETWORK and row["lengths"] == "padded"]
    drawn = [row for row in drawn if row["attention"] != "free"]
    label = "{attention}, {part}".format_map
    draw_lengths(run_dir / "bench_mosaicbert.png", drawn, PANELS, label, f"{title}, padded rows")
    report.finish(table(report.rows, NAMES, FIGURES, title, CAPTION))


CAPTION = "real tokens a second; memory beyond weights and bias table"
NAMES: Columns = {"part": "{part}", "N": "{rows} x {seq_len:,} {lengths}", "attention": "{attention}"}
FIGURES: Columns = {
    "ms": "{ms:.2f}",
    "p99": "{p99_ms:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "times sdpa": "{of_sdpa:.2f}",
    "GiB": "{peak_gib:.2f}",
}
PANELS = [
    Panel("tokens a second", "tokens_per_second", may_be_log=True),
    Panel("ms, median", "ms", may_be_log=True),
    Panel("ms, 99 of 100", "p99_ms", may_be_log=True),
    Panel("GiB", "peak_gib", may_be_log=True),
]


def cases(settings: MosaicBertBenchSettings) -> Iterator[tuple[int, str]]:
    """(seq_len, whether rows are padded or full); a batch of one row is full."""
    for seq_len in settings.seq_len:
        alone = settings.rows(seq_len) == 1
        if not alone:
            yield seq_len, "padded"
        if alone or seq_len == settings.all_parts_at:
            yield seq_len, "full"


def parts(name: str, all_parts: bool) -> tuple[str, ...]:
    """The parts that are timed for an attention at one length."""
    if name == "free":
        return NETWORK if all_parts else ()
    if name == "naive" and not all_parts:
        return ("forward",)  # its steps would take half of all the time
    return PARTS if all_parts else NETWORK


def batch(seq_len: int, rows: int, lengths: str) -> tuple[Tensor, Tensor]:
    """(rows, seq_len) ids, and 1s at the real ones; where they are padded, from an eighth of seq_len to all of it."""
    ids = torch.randint(4096, (rows, seq_len), generator=torch.Generator().manual_seed(0))
    shortest = seq_len if lengths == "full" else seq_len // 8
    ends = torch.linspace(seq_len, shortest, rows).round().long()
    return ids, (torch.arange(seq_len) < ends[:, None]).long()


def models(settings: MosaicBertBenchSettings, seq_len: int, device: torch.device) -> Iterator[tuple[str, BertModel]]:
    """Yield the models one by one, on `device`, with equal weights, each with its own bias table where it has one."""
    torch.manual_seed(0)
    made = BertModel(dnabert2_config(num_hidden_layers=settings.num_layers, alibi_starting_size=1)).to(device).eval()
    for name in settings.attention:
        model = copy.deepcopy(made)
        if name in ("flash", "free"):
            patch(model)
        else:  # 12.9 GB of float32 at 16,384 tokens, which take a CPU minutes
            model.encoder.rebuild_alibi_tensor(size=seq_len, device=device)
        if name == "sdpa":
            for layer in model.encoder.layer:
                layer.attention.self.attend = F.scaled_dot_product_attention  # its fourth argument is a bias
        if name == "free":
            for layer in model.encoder.layer:
                layer.attention.self.forward = partial(values, layer.attention.self)
        yield name, model


def values(module: nn.Module, hidden: Tensor, *_: object) -> Tensor:
    """In place of a layer's attention: each token's own value, (tokens, C)."""
    return module.Wqkv(hidden).chunk(3, dim=-1)[2]


def prepare(part: str, name: str, model: BertModel, ids: Tensor, mask: Tensor) -> Callable[[], object]:
    """The call that is timed."""
    call, inputs = partial(model, ids, mask), tuple(model.parameters())
    if part.startswith("attention"):
        call, inputs = alone(name, model, ids, mask)
    if not part.endswith("step"):
        return torch.no_grad()(call)
    gradient = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), inputs, gradient)


def alone(name: str, model: BertModel, ids: Tensor, mask: Tensor) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """A layer's attention, and its q, k, v: random ones, in views of one tensor as the model's are."""
    module, given = model.encoder.layer[0].attention.self, []
    hook = module.register_forward_pre_hook(lambda _, inputs: given.extend(inputs))
    with torch.no_grad():
        model(ids, mask)
    hook.remove()
    hidden, cu_seqlens, longest, _, _, bias = given
    heads = module.num_attention_heads
    tokens = hidden.shape[:1] if name == "flash" else mask.shape
    qkv = torch.randn(*tokens, 3, heads, 64, device=hidden.device, dtype=hidden.dtype, requires_grad=True).unbind(-3)
    if name != "flash":
        bias = bias.to(hidden.dtype)
        return lambda: module.attend(*(x.transpose(1, 2) for x in qkv), bias), qkv
    slopes = torch.tensor(alibi_slopes(heads), device=hidden.device)
    bounds = cu_seqlens, cu_seqlens, longest, longest
    return lambda: flash_attention_varlen(*qkv, *bounds, alibi_slopes=slopes), qkv


def add_ratios(rows: list[Row]) -> None:
    """Give each row sdpa's time over its own."""
    of = lambda row: (row["part"], row["lengths"], row["seq_len"])  # noqa: E731
    sdpa = {of(row): row["ms"] for row in rows if row["attention"] == "sdpa" and "ms" in row}
    for row in rows:
        if "ms" in row and of(row) in sdpa:
            row["of_sdpa"] = sdpa[of(row)] / row["ms"]


if __name__ == "__main__":
    main()
