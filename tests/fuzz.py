"""Thousands of random attention calls on a GPU, each held to the float64 oracle: `python -m tests.fuzz`.

    python -m tests.fuzz --cases 2000 --seed 0        the fixed set
    python -m tests.fuzz --cases 400                  a fresh seed, printed, so that a failure can be repeated

A kernel is compiled for a configuration (dtype, head dimensions, options that are on); a case is a configuration with
a shape, a layout, option values and a kind of input. Cases are spread over worker processes by configuration, so that
each kernel is compiled in one of them. Memory is filled with NaN before every call. The last line is one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter

import torch

from kernels import BlockMask, flash_attention, flash_attention_varlen, support
from kernels.launch import PLANS
from tests.attention_checks import (
    FLOAT32_FLOOR,
    assert_within_budget,
    lse_term,
    make_packed,
    make_qkv,
    naive_for,
    oracle,
    results,
    rounded_o_term,
)

# dtype, D, Dv, causal, options that are on: what decides which kernel is compiled
CONFIGURATIONS = [
    ("bfloat16", 64, 64, True, ()),
    ("bfloat16", 64, 64, False, ()),
    ("bfloat16", 128, 128, True, ()),
    ("bfloat16", 128, 128, False, ()),
    ("bfloat16", 16, 16, True, ()),
    ("bfloat16", 32, 32, True, ()),
    ("bfloat16", 40, 40, True, ()),
    ("bfloat16", 80, 80, False, ()),
    ("bfloat16", 96, 96, True, ()),
    ("bfloat16", 192, 128, True, ()),
    ("bfloat16", 256, 256, True, ()),
    ("bfloat16", 64, 128, False, ()),
    ("float16", 64, 64, True, ()),
    ("float16", 128, 128, True, ()),
    ("float16", 72, 72, False, ()),
    ("float32", 64, 64, True, ()),
    ("float32", 128, 128, True, ()),
    ("float32", 48, 80, False, ()),
    ("bfloat16", 64, 64, False, ("window",)),
    ("bfloat16", 128, 128, True, ("window",)),
    ("float16", 64, 64, True, ("window",)),
    ("float32", 64, 64, False, ("window",)),
    ("bfloat16", 64, 64, True, ("softcap",)),
    ("float16", 128, 128, True, ("softcap",)),
    ("float32", 64, 64, True, ("softcap",)),
    ("bfloat16", 64, 64, True, ("alibi",)),
    ("bfloat16", 128, 128, False, ("alibi",)),
    ("float32", 64, 64, True, ("alibi",)),
    ("bfloat16", 64, 64, True, ("sinks",)),
    ("float16", 128, 128, True, ("sinks",)),
    ("float32", 64, 64, False, ("sinks",)),
    ("bfloat16", 64, 64, True, ("dropout",)),
    ("float16", 128, 128, False, ("dropout",)),
    ("float32", 64, 64, True, ("dropout",)),
    ("bfloat16", 64, 64, True, ("varlen",)),
    ("bfloat16", 128, 128, False, ("varlen",)),
    ("float16", 64, 64, False, ("varlen",)),
    ("float32", 64, 64, True, ("varlen",)),
    ("bfloat16", 64, 64, True, ("varlen", "window")),
    ("bfloat16", 128, 128, True, ("varlen", "alibi", "sinks")),
    ("bfloat16", 64, 64, True, ("window", "sinks")),
    ("bfloat16", 128, 128, True, ("softcap", "alibi")),
    ("float16", 64, 64, True, ("softcap", "dropout", "sinks")),
    ("bfloat16", 64, 64, True, ("varlen", "dropout")),
    ("bfloat16", 128, 64, True, ("window", "softcap", "alibi", "sinks", "dropout")),
    ("float32", 64, 32, True, ("varlen", "window", "softcap", "alibi", "sinks", "dropout")),
    ("float16", 64, 64, False, ("window", "alibi")),
    ("bfloat16", 96, 96, True, ("varlen", "softcap")),
    ("bfloat16", 128, 128, False, ("softcap",)),
    ("float16", 128, 128, False, ("window",)),
    ("bfloat16", 128, 128, True, ("window", "softcap")),
    ("bfloat16", 64, 64, False, ("window", "softcap")),
    ("bfloat16", 128, 128, True, ("varlen",)),
    ("float16", 128, 128, True, ("varlen", "window", "softcap")),
    ("bfloat16", 64, 64, False, ("block_mask",)),
    ("bfloat16", 128, 128, False, ("block_mask",)),
    ("bfloat16", 40, 40, False, ("block_mask",)),
    ("float16", 64, 128, False, ("block_mask", "sinks")),
    ("float32", 64, 64, False, ("block_mask",)),
    ("bfloat16", 128, 128, False, ("block_mask", "softcap", "alibi")),
    ("float16", 256, 256, False, ("block_mask", "dropout")),
    ("bfloat16", 192, 192, True, ("alibi",)),
    ("bfloat16", 128, 128, False, ("block_mask", "softcap")),
]
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 384, 513, 700, 1000, 1023)
WINDOWS = (-1, 0, 1, 31, 63, 64, 65, 127, 128, 129, 500, 5000)
SCALES = (0.05, 0.2)  # of no head_dim here
KINDS = (
    "normal", "normal", "normal", "offset", "outliers", "outliers everywhere", "equal rows", "repeated maxima", "large",
    "tiny",
)  # fmt: skip
# Which kernels a call may take: those that would be chosen, the Hopper ones also in the backward of a short call, or
# the portable ones, although a Hopper kernel takes the call.
KERNELS = ("chosen", "hopper", "portable")
# How many times the plain formula's error ours may be, where 2 (3 with soft-cap) is too little by nature:
# - float32: P = exp(S - LSE) keeps 2^-24 of LSE where the naive softmax subtracts exactly, so LSE is the factor;
# - delta = rowsum(dO * O) uses the O that was rounded to the inputs' dtype, eager code its own probabilities. Where dS
#   cancels (one visible key, repeated maxima, a common offset), that rounding is all that is left. It can be computed:
#   see `rounded_o_term`. Every flash implementation has it, and twice the term is allowed beside the criterion.
# Scores near 1e8 have a float32 ulp of 8: LSE cannot hold them, and eager float16 overflows. Only O is compared.
EXTREME = "outliers everywhere"


def make_case(number: int, seed: int) -> dict:
    """Everything that decides case `number`, from the seed alone."""
    draw = random.Random(f"{seed}/{number}")
    dtype, head_dim, head_dim_v, causal, options = CONFIGURATIONS[number % len(CONFIGURATIONS)]
    kv_heads, group = draw.choice([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (1, 8), (2, 3)])
    case = {
        "number": number,
        "configuration": number % len(CONFIGURATIONS),
        "dtype": dtype,
        "kind": KINDS[number // len(CONFIGURATIONS) % len(KINDS)],
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dims": (head_dim, head_dim_v),
        "causal": causal,
        "layout": draw.choice(["bhnd", "bnhd", "padded", "strided"]),
        "batch": draw.choice([1, 1, 2, 3]),
        "num_q": draw.choice(LENGTHS),
        "num_k": draw.choice(LENGTHS),
    }
    if draw.random() < 0.5:
        case["num_k"] = case["num_q"]
    if "window" in options:
        case["window"] = (draw.choice(WINDOWS), draw.choice(WINDOWS))
    if "softcap" in options:
        case["softcap"] = draw.choice([1.0, 15.0, 50.0])
    if "alibi" in options:
        case["alibi"] = draw.choice(["heads", "rows"])
    if "sinks" in options:
        case["sinks"] = True
    if "dropout" in options:
        case["dropout_p"] = draw.choice([0.1, 0.5])
        case["dropout_seed"] = draw.randrange(2**63)
    if "varlen" in options:
        case["lengths"] = [(draw.choice((0, *LENGTHS[:16])), draw.choice((0, *LENGTHS[:16]))) for _ in range(5)]
        case["lengths"][0] = (draw.choice(LENGTHS[:16]), draw.choice(LENGTHS[:16]))
    if "block_mask" in options:
        case["block_mask"] = draw.choice(
            [(1, 1), (1, case["heads"]), (case["batch"], 1), (case["batch"], case["heads"])]
        )
    case["kernels"] = draw.choice(KERNELS)
    if draw.random() < 0.25:
        case["scale"] = draw.choice(SCALES)
    return case


def shaped(kind: str, q, k, v):
    """Turn normal inputs into the kind that the case asks for."""
    q, k, v = (x.detach().clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    tokens = 2 if q.dim() == 4 else 0
    if kind == "offset":  # scores near 400: far from zero, close together
        common = (400 / q.shape[-1] ** 0.5) ** 0.5
        q, k = q * 0.1 + common, k * 0.1 + common
    elif kind == "outliers":  # scores of some thousands
        for x in (q, v):
            x.view(-1)[:: max(1, x.numel() // 7)] = 1e4
    elif kind == EXTREME:
        for x in (q, k, v):
            x.view(-1)[:: max(1, x.numel() // 7)] = 1e4
    elif kind == "equal rows":
        q, k = (x[:, :, :1].expand_as(x).clone() if tokens else x[:1].expand_as(x).clone() for x in (q, k))
    elif kind == "repeated maxima":  # every fifth key is the same, long one, and V has one sign
        every_fifth = (slice(None),) * tokens + (slice(None, None, 5),)
        k[every_fifth] = 3 * (k[:, :, :1] if tokens else k[:1])
        v = v.abs()
    elif kind == "large":
        q = q * 50
    elif kind == "tiny":
        q = q * 1e-3
    return tuple(x.requires_grad_() for x in (q, k, v))


def random_mask(batch: int, heads: int, num_q: int, num_k: int, generator: torch.Generator) -> BlockMask:
    """Hidden, full, random and causal blocks of 128, and a few rows and columns that are hidden throughout."""
    blocks = [-(-n // 128) for n in (num_q, num_k)]
    kind = torch.randint(4, (batch, heads, *blocks), generator=generator)
    kind = kind.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :num_q, :num_k]
    row, col = torch.arange(num_q)[:, None], torch.arange(num_k)
    random = torch.rand(kind.shape, generator=generator) < torch.rand((), generator=generator)
    visible = torch.where(kind == 3, col <= row, torch.where(kind == 2, random, kind == 1))
    visible &= torch.rand((num_q, 1), generator=generator) > 0.02
    visible &= torch.rand((1, num_k), generator=generator) > 0.02
    return BlockMask.from_dense(visible)


def run_case(case: dict, device: str) -> str | None:
    """None where the case passes, otherwise what is wrong."""
    dtype = getattr(torch, case["dtype"])
    head_dim, head_dim_v = case["head_dims"]
    kind = {"head_dim_v": head_dim_v, "dtype": dtype, "device": device, "seed": case["number"]}
    heads = (case["heads"], case["kv_heads"])
    options = {
        name: case[name]
        for name in ("causal", "scale", "window", "softcap", "dropout_p", "dropout_seed")
        if name in case
    }
    if "lengths" in case:
        lengths_q, lengths_k = map(list, zip(*case["lengths"], strict=True))
        qkv, arguments = make_packed(lengths_q, lengths_k, *heads, head_dim, **kind)
        options |= arguments
        attention, rows = flash_attention_varlen, len(lengths_q)
    else:
        sizes = (case["batch"], *heads, case["num_q"], case["num_k"], head_dim)
        qkv = make_qkv(*sizes, layout=case["layout"], **kind)
        attention, rows = flash_attention, case["batch"]
    generator = torch.Generator().manual_seed(case["number"])
    if "alibi" in case:
        shape = (case["heads"],) if case["alibi"] == "heads" else (rows, case["heads"])
        options["alibi_slopes"] = torch.rand(shape, generator=generator).to(device)
    if "block_mask" in case:
        options["block_mask"] = random_mask(*case["block_mask"], case["num_q"], case["num_k"], generator).to(device)
    if "sinks" in case:
        options["sinks"] = torch.randn(case["heads"], generator=generator).to(device)
    if case["kind"] != "normal" and qkv[0].numel() and qkv[1].numel():
        qkv = shaped(case["kind"], *qkv)
    q, k, v = qkv
    packed = "lengths" in case
    do = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator).to(device, dtype)
    dlse = torch.randn(q.shape[1::-1] if packed else q.shape[:3], generator=generator).to(device)
    ours = results(attention, q, k, v, do, dlse, **options)
    again = results(attention, q, k, v, do, dlse, **options)
    for name, value in ours.items():
        if not torch.equal(value, again[name]) and not torch.isnan(value).any():
            return f"{name} differs between two runs"
    exact = oracle(q, k, v, do, dlse, **options)
    plain = results(naive_for(options), q, k, v, do, dlse, **options)
    for name, value in exact.items():  # what the dtype has no number for is infinite in any implementation
        if case["kind"] == EXTREME and name != "o":
            continue
        largest = torch.finfo(ours[name].dtype).max
        beyond = torch.isfinite(value) & (value.abs() > largest)
        if not torch.isinf(ours[name][value.abs() > 1.01 * largest]).all():
            return f"{name} is finite where {dtype} has no such number"
        for results_of in (ours, plain):
            results_of[name] = results_of[name].masked_fill(beyond, 0.0)
        exact[name] = value.masked_fill(beyond, 0.0)
    if case["kind"] == EXTREME:
        return extreme(ours["o"].double(), exact["o"], plain["o"].double())
    factor = 3.0 if "softcap" in case else 2.0
    extra = rounded_o_term(exact["o"], q, k, v, do, **options)
    finite = exact["lse"][torch.isfinite(exact["lse"])]
    largest_lse = float(finite.abs().max()) if finite.numel() else 0.0
    # LSE is a float32 sum of numbers as large as itself and the soft-cap, whatever the inputs' dtype; the plain formula
    # has no error at all where a row sees one key
    extra["lse"] = extra.get("lse", 0.0) + 2**-24 * max(largest_lse, case.get("softcap", 0.0))
    if dtype == torch.float32:
        factor = max(32.0, 2 * largest_lse)
        for name, term in lse_term(exact, dtype).items():  # the plain formula has no error where a row sees one key
            extra[name] = extra.get(name, 0.0) + term
    largest = [max(1.0, float(x.detach().abs().max()) / 4) if x.numel() else 1.0 for x in (q, v)]
    floor = FLOAT32_FLOOR * largest[0] * largest[1]
    for name, value in plain.items():
        if torch.isfinite(exact[name]).all() and not torch.isfinite(value).all():  # float16 overflowed in eager code
            error = (ours[name].double() - exact[name]).norm()
            rounding = 2 * extra.get(name, 0.0) * exact[name].numel() ** 0.5
            if not error <= 0.02 * exact[name].norm() + floor + rounding:
                return f"{name}: norm of error {error:.3g} of {exact[name].norm():.3g}, plain formula not finite"
            exact[name] = ours[name].double()  # judged
            plain[name] = exact[name]
    try:
        assert_within_budget(ours, exact, plain, factor, floor=floor, extra=extra)
    except AssertionError as error:
        return str(error)
    return None


def extreme(o, exact, plain) -> str | None:
    """O must be finite, and near the exact one wherever the plain formula can say how near."""
    if not torch.isfinite(o).all():
        return "o is not finite"
    error, allowed = ((x - exact).norm() for x in (o, plain))
    if torch.isfinite(allowed) and not error <= 4 * allowed + 0.02 * exact.norm() + 1e-3:
        return f"o: norm of error {error:.3g}, plain formula's {allowed:.3g}, result's {exact.norm():.3g}"
    return None


def run_share(job: tuple) -> list[tuple[dict, str]]:
    """A worker's cases; returns the failures."""
    cases, device = job
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then returns NaN
    torch.backends.cuda.matmul.allow_tf32 = False
    failures, head_dims = [], support.HOPPER_HEAD_DIMS
    chosen = support.HOPPER_PACKED_HEAD_DIMS, support.HOPPER_MASKED_HEAD_DIMS
    forced = support.HOPPER_HEAD_DIMS, support.HOPPER_BACKWARD_HEAD_DIMS
    for case in cases:
        narrow = forced if case["kernels"] == "hopper" else chosen
        support.HOPPER_PACKED_HEAD_DIMS, support.HOPPER_MASKED_HEAD_DIMS = narrow
        support.HOPPER_HEAD_DIMS = range(1) if case["kernels"] == "portable" else head_dims
        PLANS.clear()
        problem = run_case(case, device)
        if problem:
            failures.append((case, problem))
    return failures


def fuzz(cases: int, seed: int, workers: int, device: str = "cuda") -> dict:
    """Run cases 0 .. cases - 1 of a seed; a summary with every failure."""
    started = time.perf_counter()
    numbers = [make_case(number, seed) for number in range(cases)]
    # by configuration, so that a kernel is compiled by one worker
    jobs = [([c for c in numbers if c["configuration"] == n], device) for n in range(len(CONFIGURATIONS))]
    failures = []
    if workers == 1:  # in this process, so that tools which watch one process see the kernels
        failures += [failure for job in jobs for failure in run_share(job)]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for done, found in enumerate(pool.imap_unordered(run_share, jobs), 1):
                failures += found
                print(f"{done} of {len(jobs)} configurations: {len(failures)} failed", file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "cases": cases,
        "kinds": dict(Counter(c["kind"] for c in numbers)),
        "failed": len(failures),
        "failures": [{"problem": problem, **case} for case, problem in failures],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None, help="without it a fresh one is drawn and printed")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is here; --device cpu with TRITON_INTERPRET=1 takes the interpreter")
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    summary = fuzz(arguments.cases, seed, arguments.workers, arguments.device)
    for failure in summary["failures"][:20]:
        print(failure)
    print(json.dumps(summary | {"failures": summary["failures"][:20]}))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
