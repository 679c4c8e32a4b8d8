"""Speed of the FP8 forward: `python -m scripts.bench_fp8` times it beside ours in bfloat16 and cuDNN, in one process.

Inputs are quantized beforehand, as a cache holds them; the call is timed as a user makes it, checks, launches and the
transposition of V included (of which the share is a column of its own). TFLOP/s count 4 B H N^2 D, halved when causal;
p50 of many runs with a cold L2 cache. Beside speed: the relative error of O against float64, in percent, on the first
head. Needs a Hopper GPU. The last line is one JSON object.
"""

import json
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conf.program import program
from kernels import flash_attention, flash_attention_fp8, naive_attention, quantize_per_head
from kernels.measure import measure
from kernels.support import why_not_fp8
from training.hardware import HardwareConfig, set_up
from training.provenance import provenance


@dataclass
class Fp8BenchSettings:
    seq_len: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192, 16384])
    head_dim: list[int] = field(default_factory=lambda: [128, 64])
    tokens: int = 16384  # of one call: the batch is tokens / seq_len, at least 1
    hidden: int = 2048  # heads times head_dim
    budget_ms: float = 100.0  # time spent on the runs of one figure
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        for head_dim in self.head_dim:
            if self.hidden % head_dim:
                raise ValueError(f"hidden={self.hidden} must be a multiple of head_dim {head_dim}")


@program("bench_fp8", Fp8BenchSettings)
def main(settings: Fp8BenchSettings, run_dir: Path) -> None:
    hardware = set_up(settings.hardware)
    probe = torch.empty(1, 1, 1, settings.head_dim[0], dtype=torch.float8_e4m3fn, device=hardware.device)
    reason = why_not_fp8(probe, probe, probe)
    if reason is not None:
        raise ValueError(reason)
    rows = [
        time_shape(settings, head_dim, seq_len, causal, hardware.device)
        for head_dim, causal, seq_len in product(settings.head_dim, (False, True), settings.seq_len)
    ]
    console = Console(highlight=False, width=140)
    console.print(hardware.description, markup=False)
    console.print(table(rows))
    report = {"hardware": hardware.description, "provenance": provenance(), "rows": rows}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "bench_fp8.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"hardware": hardware.description, "rows": rows}))


def time_shape(settings: Fp8BenchSettings, head_dim: int, seq_len: int, causal: bool, device: torch.device) -> dict:
    """TFLOP/s of each implementation, V's share of the FP8 call, and two errors."""
    from kernels.hopper.fp8_kernel import launch_values

    batch, heads = max(1, settings.tokens // seq_len), settings.hidden // head_dim
    generator = torch.Generator(device).manual_seed(0)
    kind = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    q, k, v = (torch.randn((batch, seq_len, heads, head_dim), **kind).transpose(1, 2) for _ in range(3))
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (quantize_per_head(x) for x in (q, k, v))

    def fp8() -> Tensor:
        return flash_attention_fp8(
            q8, k8, v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=causal
        )  # fmt: skip

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    calls = {"fp8": fp8, "bf16": lambda: flash_attention(q, k, v, causal=causal), "cudnn_bf16": cudnn}
    with torch.no_grad():
        ms = {name: measure(call, device, settings.budget_ms).p50 for name, call in calls.items()}
        values = torch.empty((batch, heads, head_dim, -(-seq_len // 16) * 16), dtype=v8.dtype, device=device)
        values_ms = measure(lambda: launch_values(v8, values), device, settings.budget_ms).p50
        rows = slice(seq_len - min(seq_len, 1024), seq_len)  # the last: float64 scores of all may not fit
        one = [x[:1, :1].double() for x in (q, k, v)]
        exact = naive_attention(one[0][:, :, rows], *one[1:], causal=causal)
        errors = {name: relative_error(calls[name]()[:1, :1, rows], exact) for name in ("fp8", "bf16")}
    flops = 4 * batch * heads * seq_len**2 * head_dim * (0.5 if causal else 1.0)
    return {
        "head_dim": head_dim, "seq_len": seq_len, "mask": "causal" if causal else "full",
        "tflops": {name: flops / spent / 1e9 for name, spent in ms.items()},
        "ms": ms, "values_ms": values_ms, "relative_error": errors,
    }  # fmt: skip


def relative_error(o: Tensor, exact: Tensor) -> float:
    return float(((o.double() - exact).square().mean() / exact.square().mean()).sqrt())


def table(rows: list[dict]) -> Table:
    result = Table(box=box.SIMPLE)
    for column in ("D, N, mask", "FP8", "ours bf16", "cuDNN bf16", "V's share", "error FP8", "bf16"):
        result.add_column(column, justify="left" if column == "D, N, mask" else "right")
    for row in rows:
        speeds = [f"{row['tflops'][name]:.0f}" for name in ("fp8", "bf16", "cudnn_bf16")]
        errors = [f"{100 * row['relative_error'][name]:.2f} %" for name in ("fp8", "bf16")]
        share = f"{100 * row['values_ms'] / row['ms']['fp8']:.1f} %"
        result.add_row(f"{row['head_dim']}, {row['seq_len']:,} {row['mask']}", *speeds, share, *errors)
    return result


if __name__ == "__main__":
    main()
