"""The arithmetic behind flash attention: `python -m scripts.explain seq_len=4096 head_dim=128 num_heads=32 gpu=h200`.

Prints memory term by term, FLOPs, HBM traffic and arithmetic intensity, which side of the GPU's roofline each falls
on, shared memory of tiles, and the two loop orders. Where there is a GPU, the predicted time and memory stand beside
measured ones. The last line is one JSON object.

`what=memory` explains instead what a training step holds, for the arguments that train.py would get, on this machine's
GPU or else on one elsewhere: `python -m scripts.explain what=memory experiment=long_context model.attention=naive`.
What is held at the fullest moment of forward, backward and optimizer, by kind, and by each layer's modules: what
training/tracker.py sees.

Standard attention writes the scores S and the probabilities P, N x N for each head, to memory; flash attention keeps
only the log-sum-exp of each row. Sources: FlashAttention, arXiv:2205.14135, theorem 2; FlashAttention-2,
arXiv:2307.08691, section 3; the roofline of Williams et al. 2009.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as ConsoleTable

from conf.program import program
from conf.schema import Settings
from kernels import flash_attention, naive_attention, tiled_attention
from kernels.call import Options
from kernels.device import GPU, GPUS
from kernels.tiled import tile_order
from scripts.bench.clock import measure
from scripts.bench.report import Table, table
from training.hardware import DTYPES, Hardware, set_up
from training.memory import GIB, Plan
from training.run import resolve
from training.speed import attention_flops

STATISTIC = 4  # bytes of a row's log-sum-exp, maximum or sum: float32
FULL = Options(causal=False, scale=1.0)
VOCABULARY = {"bytes": 257, "characters": 100, "gpt2": 50257}  # token ids of each tokenizer
TILES = ((64, 64), (128, 64), (128, 128), (128, 256), (256, 128))
# gpu=rtx4090; gpu=h100 is the SXM5 board, whose own name says no more than its memory
BOARDS = {board.name.removesuffix(" 80GB HBM3").replace(" ", "").lower(): board for board in reversed(GPUS)}


@dataclass
class Shape:
    """One attention layer; causal halves the pairs that need computing, not those that standard attention stores."""

    batch: int = 1  # sequences
    num_heads: int = 32  # of queries, keys and values alike
    seq_len: int = 4096  # queries and keys alike
    head_dim: int = 128  # columns of q, k and v
    element: int = 2  # bytes of a number
    causal: bool = False  # half of the scores are hidden

    @property
    def rows(self) -> int:
        return self.batch * self.num_heads * self.seq_len

    @property
    def tensor_bytes(self) -> int:
        """One of Q, K, V, O."""
        return self.rows * self.head_dim * self.element

    @property
    def matrix_bytes(self) -> int:
        """One of S and P, in the inputs' precision."""
        return self.rows * self.seq_len * self.element

    @property
    def pairs(self) -> float:
        """(query, key) pairs over all heads."""
        return self.rows * self.seq_len * (0.5 if self.causal else 1.0)


@dataclass
class ExplainSettings(Settings, Shape):
    what: str = "attention"  # attention | memory (of a training step)
    vocab_size: int | None = None  # with what=memory; null: the tokenizer's (of characters: a hundred)
    num_layers: int = 32  # for the model's total
    gpu: str = "h200"  # t4 | a100 | h100 | h200 | b200 | rtx4090 | any of kernels/device.py

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what not in ("attention", "memory"):
            raise ValueError(f"what={self.what} is unknown; use attention or memory")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least 1, or null")
        for key in ("seq_len", "head_dim", "num_heads", "batch", "num_layers", "element"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.gpu not in BOARDS:
            raise ValueError(f"gpu={self.gpu} is not in the table; use one of {', '.join(BOARDS)}")


@program("config", ExplainSettings, experiment="quickstart", run_dir=".")
def main(settings: ExplainSettings, run_dir: Path) -> None:
    console = Console(highlight=False, width=110)
    if settings.what == "memory":
        print(json.dumps(show_step(console, settings)))
        return
    gpu = BOARDS[settings.gpu]
    report = {
        "shape": {field.name: getattr(settings, field.name) for field in fields(Shape)},
        "gpu": asdict(gpu),
        "memory": show_memory(console, settings, settings.num_layers),
        "flops": show_flops(console, settings),
        "roofline": show_roofline(console, settings, gpu),
        "tiles": show_tiles(console, settings, gpu),
        "loop_orders": show_loop_orders(console, settings),
    }
    device = set_up(settings.hardware).device
    if device.type == "cuda":
        report["measured"] = show_measured(console, settings, gpu, device)
    print(json.dumps(report))


# --- attention: the formulas


def memory(shape: Shape) -> dict[str, dict[str, int]]:
    """Bytes that one layer keeps for its backward: 4BHND + 2BHN^2 elements, or 4BHND elements and BHN statistics."""
    tensors = dict.fromkeys("QKVO", shape.tensor_bytes)
    return {
        "standard": tensors | {"S": shape.matrix_bytes, "P": shape.matrix_bytes},
        "flash": tensors | {"LSE": shape.rows * STATISTIC},
    }


def flops(shape: Shape) -> dict[str, float]:
    """FLOPs by pass. A product over the pairs costs 2 D a pair: forward has 2 of them, standard backward 4 (dV, dP, dQ,
    dK), recomputing backward 5 (S again)."""
    product = attention_flops(shape.pairs, shape.head_dim) / 2
    return {"forward": 2 * product, "standard backward": 4 * product, "recomputing backward": 5 * product}


def recomputation_share(shape: Shape) -> dict[str, float]:
    """What computing S again costs, three ways to say it. The often quoted 33 % is one product of three: the forward's
    two and the one that is done again, the backward's own four left out."""
    forward, standard, recomputing = flops(shape).values()
    extra = recomputing - standard
    return {
        "of forward and standard backward": extra / (forward + standard),
        "of the standard backward": extra / standard,
        "of the forward and itself: the often quoted third, which leaves the backward out": extra / (forward + extra),
    }


def loop_order_bytes(shape: Shape, *, block_q: int = 128, block_k: int = 128) -> dict[str, dict[str, float]]:
    """HBM traffic of the two loop orders, forward; a causal mask leaves half of the inner loop.

    FlashAttention-1 has keys outside: for each tile of keys every query's O, maximum and sum are read and written
    again. FlashAttention-2 has queries outside: the row state stays on the chip, K and V are read for each tile of
    queries.
    """
    share = 0.5 if shape.causal else 1.0
    q_tiles, k_tiles = (max(share * -(-shape.seq_len // block), 1.0) for block in (block_q, block_k))
    state = shape.tensor_bytes + 2 * shape.rows * STATISTIC
    return {
        "keys outside (FA1)": {
            "Q": k_tiles * shape.tensor_bytes,
            "K, V": 2 * shape.tensor_bytes,
            "O, maximum, sum": (2 * k_tiles - 1) * state,
        },
        "queries outside (FA2)": {
            "Q": shape.tensor_bytes,
            "K, V": 2 * q_tiles * shape.tensor_bytes,
            "O, LSE": shape.tensor_bytes + shape.rows * STATISTIC,
        },
    }


def hbm_bytes(shape: Shape) -> dict[str, float]:
    """Forward traffic between HBM and chip.

    standard: Q, K, V in, O out, and S and P each written once and read once. flash: queries outside, and what the L2
    cache catches is not taken off, or all of it.
    """
    return {
        "standard": 4 * shape.tensor_bytes + 4 * shape.matrix_bytes,
        "flash": sum(loop_order_bytes(shape)["queries outside (FA2)"].values()),
        "flash, K and V caught by L2": 4 * shape.tensor_bytes + shape.rows * STATISTIC,
    }


def roofline(shape: Shape, gpu: GPU) -> list[dict]:
    """The least time of a forward: the longer of arithmetic and memory traffic. What the softmax needs is not
    counted."""
    count, rows = flops(shape)["forward"], []
    for name, moved in hbm_bytes(shape).items():
        limits = {"arithmetic": count / gpu.dense_flops, "memory": moved / gpu.memory_bytes_per_second}
        limit = max(limits, key=limits.__getitem__)
        facts = {"bytes": moved, "flops_per_byte": count / moved, "limit": limit, "seconds": limits[limit]}
        rows.append({"name": name} | facts)
    return rows


def tile_loads(pairs: Iterable[tuple[object, object]]) -> tuple[int, int]:
    """How often a loop over (query tile, key tile) takes up another tile of queries, and another tile of keys."""
    counts, held = [0, 0], [None, None]
    for pair in pairs:
        for side in (0, 1):
            counts[side] += pair[side] != held[side]
            held[side] = pair[side]
    return counts[0], counts[1]


def tile_bytes(block_q: int, block_k: int, head_dim: int, element: int = 2, stages: int = 2) -> dict[str, int]:
    """Shared memory of a forward tile: Q, `stages` tiles of K and of V, S in fp32 where it does not stay in registers,
    O's tile for the store, and the row statistics."""
    return {
        "Q": block_q * head_dim * element,
        "K": stages * block_k * head_dim * element,
        "V": stages * block_k * head_dim * element,
        "S": block_q * block_k * 4,
        "O": block_q * head_dim * element,
        "maximum, sum": 2 * block_q * STATISTIC,
    }


# --- attention: what is printed; each returns what it prints


def show_memory(console: Console, shape: Shape, num_layers: int) -> dict:
    found, lines = memory(shape), []
    for name, terms in found.items():
        total = sum(terms.values())
        lines.append([name, terms_of(terms), size_of(total), size_of(num_layers * total)])
    headings = ["", "terms", "one layer", f"{num_layers} layers"]
    console.print(Table(2, headings, lines, "memory that one layer keeps for its backward").console())
    console.print("standard: 4BHND + 2BHN^2 numbers; flash: 4BHND numbers and BHN float32 statistics.\n")
    return found


def show_flops(console: Console, shape: Shape) -> dict:
    found, shares = flops(shape), recomputation_share(shape)
    lines = [[name, f"{count:.4g}", f"{2 * count / found['forward']:.0f} x 2N^2D"] for name, count in found.items()]
    console.print(Table(1, ["pass", "FLOPs", "products"], lines, "arithmetic").console())
    for name, share in shares.items():
        console.print(f"computing S again is {share:.1%} {name}", markup=False)
    console.print()
    return found | {"recomputation": shares}


def show_roofline(console: Console, shape: Shape, gpu: GPU) -> list[dict]:
    rows, lines = roofline(shape, gpu), []
    for row in rows:
        figures = size_of(row["bytes"]), f"{row['flops_per_byte']:.0f}", f"{1e3 * row['seconds']:.3f} ms"
        lines.append([row["name"], row["limit"], *figures])
    headings = ["", "limited by", "HBM traffic", "FLOPs a byte", "least time"]
    peaks = f"{gpu.dense_flops / 1e12:.0f} TFLOP/s, {gpu.memory_bytes_per_second / 1e12:.2f} TB/s"
    console.print(Table(2, headings, lines, f"forward on {gpu.name}: {peaks}").console())
    console.print(f"The crossover of {gpu.name} is at {gpu.ridge:.0f} FLOPs a byte.\n", markup=False)
    return rows


def show_tiles(console: Console, shape: Shape, gpu: GPU) -> list[dict]:
    rows = []
    for block_q, block_k in TILES:
        terms = tile_bytes(block_q, block_k, shape.head_dim, shape.element)
        total, fits = sum(terms.values()), "no"
        if total <= gpu.shared_bytes:
            fits = "yes"
        elif total - terms["S"] - terms["O"] <= gpu.shared_bytes:
            fits = "with S and O in registers"
        rows.append({"queries x keys": f"{block_q} x {block_k}", "fits": fits} | terms | {"in all": total})
    title = f"shared memory of a tile, KiB, K and V twice; {gpu.name} has {gpu.shared_bytes // 1024} KiB a block"
    console.print(sizes(rows, 2, 2**10, 0, title))
    return rows


def show_loop_orders(console: Console, shape: Shape) -> dict:
    found = loop_order_bytes(shape)
    lines = [[name, terms_of(terms), size_of(sum(terms.values()))] for name, terms in found.items()]
    title = "HBM traffic of the two loop orders, forward, tiles of 128 x 128, nothing caught by L2"
    console.print(Table(2, ["outer loop", "terms", "in all"], lines, title).console())
    q, k, v = torch.randn(3, 1, 1, 512, 64).unbind()
    outputs = {}
    for outer in ("keys", "queries"):
        outputs[outer] = tiled_attention(q, k, v, outer=outer)
        loads = tile_loads(tile_order(512, 512, FULL, 128, 128, outer))
        console.print(
            f"512 tokens with {outer} outside: rows and their state taken up {loads[0]} times, keys {loads[1]} times"
        )
    same = torch.equal(outputs["keys"], outputs["queries"])
    console.print(f"The PyTorch reference ran in both orders: {'the same bits' if same else 'DIFFERENT NUMBERS'}.\n")
    return found | {"same_bits": same}


def show_measured(console: Console, shape: Shape, gpu: GPU, device: torch.device) -> list[dict]:
    """Time and extra memory of a forward, beside the roofline of the named GPU."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.element]
    size = (shape.batch, shape.seq_len, shape.num_heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    standard, _, flash = roofline(shape, gpu)  # flash with K and V caught by L2
    rows = []
    for name, attention, least in (("standard", naive_attention, standard), ("flash", flash_attention, flash)):
        rows.append({"name": name, "roofline_ms": 1e3 * least["seconds"]})
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        try:
            with torch.no_grad():
                attention(q, k, v, causal=shape.causal)
                rows[-1]["extra_mib"] = (torch.cuda.max_memory_allocated(device) - held) / 2**20
                rows[-1]["ms"] = measure(lambda a=attention: a(q, k, v, causal=shape.causal), device).p50
        except torch.OutOfMemoryError:
            rows[-1]["error"] = "out of memory"
    names = {"": "{name}"}
    figures = {"ms": "{ms:.3f}", "roofline, ms": "{roofline_ms:.3f}", "MiB beyond the inputs": "{extra_mib:,.1f}"}
    console.print(table(rows, names, figures, f"measured on {torch.cuda.get_device_name(device)}").console())
    return rows


# --- a training step's memory


def show_step(console: Console, settings: ExplainSettings) -> dict:
    """Terms by moment and activations by layer."""
    hardware = None
    if not torch.cuda.is_available():
        dtype, compiled = DTYPES.get(settings.hardware.dtype, torch.bfloat16), settings.hardware.compile is not False
        words = f"a GPU elsewhere, {dtype}, {'compiled' if compiled else 'eager'}"
        hardware = Hardware(torch.device("cuda"), dtype, compiled, words)
    vocab_size = settings.vocab_size or VOCABULARY[settings.tokenizer]
    run = resolve(settings, vocab_size=vocab_size, hardware=hardware)
    model, plan = run.model, run.plan
    console.print(
        f"{run.micro_batch} x {run.seq_len:,} tokens at a time, {run.sequences_per_step // run.micro_batch} times a "
        f"step; {vocab_size:,} token ids; attention {model.attention}, loss {model.loss}, checkpointing "
        f"{model.activation_checkpointing}, {settings.optim.name}; {run.hardware.description}",
        markup=False,
    )
    moments = {part: plan.kinds(part) for part in plan.moments}
    kinds = dict.fromkeys(kind for terms in moments.values() for kind in terms)
    rows = [{"": kind} | {part: terms.get(kind, 0) for part, terms in moments.items()} for kind in kinds]
    rows.append({"": "in all"} | {part: sum(terms.values()) for part, terms in moments.items()})
    console.print(sizes(rows, 1, GIB, 3, "GiB at the fullest moment of each part of the step"))

    layers = activations_by_layer(plan)
    rows = [{"layer": number} | terms | {"in all": sum(terms.values())} for number, terms in enumerate(layers)]
    title = "activations of each layer at the forward's fullest moment, MiB, by the module that made them"
    console.print(sizes(rows, 1, 2**20, 1, title))
    console.print(str(plan), markup=False, soft_wrap=True)
    return {"peak_bytes": plan.peak, "fullest": plan.fullest, "moments": moments, "layers": layers}


def activations_by_layer(plan: Plan) -> list[dict[str, int]]:
    """Bytes at the forward's fullest moment that each block holds, by its module; its own are the residual stream."""
    layers: list[dict[str, int]] = [{} for _ in range(plan.model.num_layers)]
    for (kind, module), size in plan.moments["forward"].items():
        if kind == "activations" and module.startswith("blocks."):
            _, number, *inside = module.split(".")
            layers[int(number)][".".join(inside) or "block"] = size
    return layers


# --- words


def sizes(rows: list[dict], named: int, unit: int, digits: int, title: str) -> ConsoleTable:
    """Rows of bytes, after so many names, in units of so many bytes."""
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    lines = [
        [str(row[name]) for name in headings[:named]]
        + [f"{row.get(heading, 0) / unit:,.{digits}f}" for heading in headings[named:]]
        for row in rows
    ]
    return Table(named, headings, lines, title).console()


def terms_of(terms: dict[str, float]) -> str:
    return " + ".join(f"{name} {size_of(size)}" for name, size in terms.items())


def size_of(bytes_: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= factor:
            return f"{bytes_ / factor:,.4g} {unit}"
    return f"{bytes_:.0f} B"


if __name__ == "__main__":
    main()
