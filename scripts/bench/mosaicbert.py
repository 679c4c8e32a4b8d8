"""DNABERT-2's network over long sequences: `python -m scripts.bench.mosaicbert` times a forward of padded batches.

`naive` is its own PyTorch path, `sdpa` PyTorch's attention with its dense bias, `flash` the same model after
`model.mosaicbert.patch`. Weights are random, code and sizes those of scripts/mosaicbert.py. Rows of a batch have
between half and all of seq_len tokens; only those count. The last line is one JSON object.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.program import program
from model.mosaicbert import patch
from scripts.bench.clock import measure, peak_bytes
from scripts.bench.report import Columns, Panel, Report, draw_lengths, refuse_below_one, refuse_unknown, table
from scripts.mosaicbert import BertModel, dnabert2_config
from training.hardware import HardwareConfig, set_up

ATTENTION = ("naive", "sdpa", "flash")


@dataclass
class MosaicBertBenchSettings:
    seq_len: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192, 16384])  # of a batch's longest row
    attention: list[str] = field(default_factory=lambda: list(ATTENTION))  # naive | sdpa | flash
    batch_tokens: int = 16384  # padding included; one row at least
    num_layers: int = 12  # DNABERT-2's
    budget_ms: float = 1000.0  # of measuring, each
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        refuse_unknown("bench", self, attention=ATTENTION)
        refuse_below_one("", self, "seq_len", "batch_tokens", "num_layers")


@program("tool", MosaicBertBenchSettings, run_dir="runs/bench_mosaicbert")
def main(settings: MosaicBertBenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    report = Report("bench_mosaicbert", run_dir, hardware.description)
    for seq_len in settings.seq_len:
        torch.manual_seed(0)
        ids, mask = padded(seq_len, max(1, settings.batch_tokens // seq_len))
        ids, mask, tokens = ids.to(hardware.device), mask.to(hardware.device), int(mask.sum())
        for name, model in models(settings, seq_len, hardware.device):
            model = model.eval().to(hardware.dtype)
            model.encoder.alibi = model.encoder.alibi.to(hardware.dtype)  # no layer has to cast it
            row = {"attention": name, "seq_len": seq_len, "rows": len(ids), "tokens": tokens}

            def forward(model=model, ids=ids, mask=mask) -> Tensor:
                with torch.no_grad():
                    return model(ids, mask)

            try:
                forward()  # what is built once is not of the step
                peak = peak_bytes(forward, hardware.device)
                times = measure(forward, hardware.device, settings.budget_ms, runs=200)
                row |= {"ms": times.p50, "p99_ms": times.p99, "tokens_per_second": 1e3 * tokens / times.p50}
                row["peak_gib"] = None if peak is None else peak / 2**30
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            report.rows.append(row)
            took = f"{row['ms']:.2f} ms" if "ms" in row else row["error"]
            print(f"{seq_len:,} tokens, {name}: {took}", flush=True)
            del model, forward
    title = f"{settings.num_layers} layers, 12 heads of 64, ALiBi, forward"
    draw_lengths(run_dir / "bench_mosaicbert.png", report.rows, PANELS, lambda row: row["attention"], title)
    report.finish(
        table(report.rows, NAMES, FIGURES, title, "real tokens a second; memory beyond weights and bias table")
    )


NAMES: Columns = {"N": "{seq_len:,}", "rows": "{rows}", "attention": "{attention}"}
FIGURES: Columns = {
    "ms": "{ms:.2f}",
    "p99": "{p99_ms:.2f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "GiB": "{peak_gib:.2f}",
}
PANELS = [
    Panel("tokens a second", "tokens_per_second", may_be_log=True),
    Panel("ms, median", "ms", may_be_log=True),
    Panel("ms, 99 of 100", "p99_ms", may_be_log=True),
    Panel("GiB of a forward", "peak_gib", may_be_log=True),
]


def padded(seq_len: int, rows: int) -> tuple[Tensor, Tensor]:
    """(rows, seq_len) ids, and 1s at the real ones; the first row is full."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4096, (rows, seq_len), generator=generator)
    lengths = torch.randint(seq_len // 2, seq_len + 1, (rows, 1), generator=generator)
    lengths[0] = seq_len
    return ids, (torch.arange(seq_len) < lengths).long()


def models(settings: MosaicBertBenchSettings, seq_len: int, device: torch.device) -> Iterator[tuple[str, BertModel]]:
    """One after the other, on `device`, with equal weights, each with its own bias table where it has one."""
    made = BertModel(dnabert2_config(num_hidden_layers=settings.num_layers, alibi_starting_size=1)).to(device)
    for name in settings.attention:
        model = copy.deepcopy(made)
        if name == "flash":
            patch(model)
        else:  # 12.9 GB of float32 at 16,384 tokens, which take a CPU minutes
            model.encoder.rebuild_alibi_tensor(size=seq_len, device=device)
        if name == "sdpa":
            for layer in model.encoder.layer:
                layer.attention.self.attend = with_bias
        yield name, model


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


if __name__ == "__main__":
    main()
