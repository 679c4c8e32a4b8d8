"""How wrong attention is: `python -m scripts.bench.error_budget` compares ours, PyTorch's formula and SDPA to float64.

For each feature, dtype and head dimension: the largest error of O, dQ, dK and dV, ours beside the plain PyTorch
formula in the same precision and beside scaled_dot_product_attention, and the bias of O: its mean signed error over
several draws, with a 95 % confidence interval. Flash-attention's criterion is that our largest error is at most twice
the plain formula's. "repeated maxima" repeats every row's largest score and gives V one sign, where rounding P V to
bfloat16 is biased (arXiv:2510.04212). The table goes to the terminal and, as Markdown and JSON, to the run's folder.
The last line is one JSON object.
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.program import program
from kernels import flash_attention, flash_attention_varlen, naive_attention, naive_attention_varlen
from scripts.bench.report import Columns, Report, Row, refuse_out_of_range, refuse_unknown, set_up_gpu, table
from scripts.selftest import gradients
from training.hardware import DTYPES, HardwareConfig

TENSORS = ("o", "dq", "dk", "dv")
CASES = {
    "full": {},
    "causal": {"causal": True},
    "repeated maxima": {},
    "window": {"causal": True, "window": (100, 0)},
    "softcap": {"causal": True, "softcap": 15.0},
    "alibi": {"causal": True},
    "sinks": {"causal": True},
    "dropout": {"causal": True, "dropout_p": 0.1, "dropout_seed": 1},
    "varlen": {"causal": True},
}
SMOKE = "budget.dtypes=[float32] budget.head_dim=[16] budget.seq_len=64 budget.num_heads=1 budget.draws=2"
BY_SDPA = ("full", "causal", "repeated maxima")  # what PyTorch's own attention supports without a mask in memory


@dataclass
class BudgetConfig:
    cases: list[str] = field(default_factory=lambda: list(CASES))  # options of attention, each by itself
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float16", "float32"])  # of q, k and v
    head_dim: list[int] = field(default_factory=lambda: [64, 128])  # 16 to 256
    seq_len: int = 1024  # tokens of queries and of keys
    num_heads: int = 4  # of queries
    draws: int = 8  # independent inputs; the confidence interval is over them

    def __post_init__(self) -> None:
        refuse_unknown("budget.", self, cases=CASES, dtypes=DTYPES)
        refuse_out_of_range("budget.", self, "head_dim", "seq_len", "num_heads")
        if self.draws < 2:
            raise ValueError(f"budget.draws={self.draws} must be at least 2: a spread needs two")


@dataclass
class BudgetSettings:
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


@program("tool", BudgetSettings, run_dir="runs/error_budget")
def main(settings: BudgetSettings, run_dir: Path) -> None:
    config = replace(settings.hardware, tf32=False)  # the float32 baseline must not be TF32
    hardware = set_up_gpu("the error of attention", config, SMOKE)
    budget, report = settings.budget, Report("error_budget", run_dir, hardware.description)
    for case, dtype, head_dim in product(budget.cases, budget.dtypes, budget.head_dim):
        report.add(measure(case, dtype, head_dim, budget, hardware.device))
    rows = report.rows
    report.more["summary"] = {
        "worst_ratio_to_plain": {x: max((row["ratio"][x] for row in rows), default=None) for x in TENSORS},
        "over_twice": [[row["case"], row["dtype"], row["head_dim"], x] for row in rows for x in over_budget(row)],
        "more_biased_than_plain": [[r["case"], r["dtype"], r["head_dim"]] for r in rows if not r["bias_no_larger"]],
    }
    report.finish(table(rows, NAMES, FIGURES))


NAMES: Columns = {"case": "{case}", "dtype": "{dtype}", "D": "{head_dim}"}
ERRORS = "{ours[x]:.1e} / {plain[x]:.1e} / {sdpa[x]:.1e} ({ratio[x]:.2f})"
FIGURES: Columns = {f"{x}: ours / plain / SDPA (ratio)": ERRORS.replace("[x]", f"[{x}]") for x in TENSORS}
BIASES = "{bias[ours][0]:+.1e} ± {bias[ours][1]:.0e} / {bias[plain][0]:+.1e} ± {bias[plain][1]:.0e}"
FIGURES["bias of O: ours / plain (95 %)"] = BIASES


def over_budget(row: Row) -> list[str]:
    """The tensors whose error is more than twice the plain formula's and more than float32's own rounding."""
    return [x for x in TENSORS if row["ratio"][x] > 2.0 and row["ours"][x] > 1e-5]


def measure(case: str, dtype: str, head_dim: int, budget: BudgetConfig, device: torch.device) -> Row:
    """Errors of every implementation over the draws."""
    ours, plain = flash_attention, naive_attention
    if case == "varlen":
        ours, plain = flash_attention_varlen, naive_attention_varlen
    attentions = {"ours": ours, "plain": plain} | ({"sdpa": sdpa} if case in BY_SDPA else {})
    worst = {name: dict.fromkeys(TENSORS, 0.0) for name in attentions}
    means: dict[str, list[float]] = {name: [] for name in attentions}
    for draw in range(budget.draws):
        inputs, options = make_inputs(case, DTYPES[dtype], head_dim, budget, device, seed=draw)
        exact = gradients(plain, [x.double() for x in inputs], **options)
        for name, attention in attentions.items():
            found = gradients(attention, inputs, **options)
            wrong = {x: a.double() - e for x, a, e in zip(TENSORS, found, exact, strict=True)}
            worst[name] = {x: max(worst[name][x], float(wrong[x].abs().max())) for x in TENSORS}
            means[name].append(float(wrong["o"].mean()))
    biases = {name: (statistics.fmean(values), confidence(values)) for name, values in means.items()}
    (our_bias, our_interval), (plain_bias, plain_interval) = biases["ours"], biases["plain"]
    return {
        "case": case,
        "dtype": dtype,
        "head_dim": head_dim,
        **worst,
        "ratio": {x: worst["ours"][x] / max(worst["plain"][x], 1e-30) for x in TENSORS},
        "bias": biases,
        # both are estimates: ours is called larger only where the intervals say so
        "bias_no_larger": abs(our_bias) - our_interval <= abs(plain_bias) + plain_interval,
    }


def confidence(values: list[float]) -> float:
    """Half of the 95 % interval of the mean, from Student's t, approximated to 2 % for 8 draws or more."""
    freedom = len(values) - 1
    t = 1.96 + 2.4 / freedom + 3.0 / freedom**2
    return t * statistics.stdev(values) / math.sqrt(len(values))


def make_inputs(case: str, dtype: torch.dtype, head_dim: int, budget: BudgetConfig, device, seed: int):
    """(q, k, v, dO), options."""
    generator = torch.Generator().manual_seed(seed)
    heads, tokens = budget.num_heads, budget.seq_len
    options = dict(CASES[case])
    packed = case == "varlen"
    shape = (tokens, heads, head_dim) if packed else (1, heads, tokens, head_dim)
    q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    if case == "repeated maxima":
        k[:, :, ::8] = 2 * k[:, :, :1]  # one key in eight is the same, and long: many rows' maximum
        v, do = v.abs(), do.abs()
    if case == "alibi":
        options["alibi_slopes"] = torch.tensor([2.0 ** -(h + 1) for h in range(heads)], device=device)
    if case == "sinks":
        options["sinks"] = torch.randn(heads, generator=generator).to(device)
    if packed:
        ends = sorted(torch.randperm(tokens, generator=generator)[:7].tolist())
        starts = torch.tensor([0, *ends, tokens], dtype=torch.int32, device=device)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
    return [q, k, v, do], options


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


if __name__ == "__main__":
    main()
