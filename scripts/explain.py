"""The arithmetic behind flash attention: `python -m scripts.explain seq_len=4096 head_dim=128 num_heads=32 gpu=h200`.

Prints memory term by term, FLOPs, HBM traffic of the two loop orders, arithmetic intensity, and which side of the GPU's
roofline each falls on. `scripts.bench.attention` measures speed and memory; `scripts.bench.compile_kernels` prints the
shared memory of a tile. The last line is one JSON object. With `model.mask=prefix:512`, or another pattern, it
also counts the blocks of 128 x 128 pairs that the kernels visit and skip.

`what=memory` explains instead what a training step holds, for train.py's arguments, on this machine's GPU or, without
one, on a GPU elsewhere: `python -m scripts.explain what=memory experiment=long_context model.attention=naive`.
It prints what is held at the fullest moment of forward, backward and optimizer, by kind, and by each layer's modules,
as training/tracker.py sees it. `processes=8 parallel.data=shard` prints it for one of eight GPUs that share weights.

Standard attention writes the scores S and the probabilities P, N x N for each head, to memory; flash attention keeps
only the log-sum-exp of each row. Sources: FlashAttention, arXiv:2205.14135, theorem 2; FlashAttention-2,
arXiv:2307.08691, section 3; the roofline of Williams et al. 2009.
"""

import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from conf.program import key_of, program
from conf.schema import Settings
from data import build_tokenizer, tokenizer_state
from kernels import block_mask
from kernels.device import GPU, GPUS
from kernels.mask_visits import BLOCK
from model.masks import mask_mod
from scripts.bench.report import Table, refuse_out_of_range, refuse_unknown, table
from training import resume
from training.checkpoint import META, Checkpoint
from training.hardware import DTYPES, Hardware, choose_hardware
from training.memory import GIB, Plan
from training.parallel import World
from training.run import resolve
from training.speed import attention_flops

MIB = 2**20
STATISTIC = 4  # bytes of a row's log-sum-exp, maximum or sum: float32
VOCABULARY = {"bytes": 257, "characters": 100, "gpt2": 50257}  # token ids of each tokenizer; a folder has its own
OF_A_RUN = {  # key of one layer of attention -> the run's key that what=memory reads in its place
    "batch": "train.micro_batch", "num_heads": "model.num_heads", "seq_len": "data.seq_len",
    "head_dim": "model.n_embd", "element": "hardware.dtype", "num_layers": "model.num_layers",
}  # fmt: skip
# gpu=rtx4090; gpu=h100 is the SXM5 board, whose full name adds only its memory
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
    processes: int = 1  # with what=memory: how many train together, as torchrun would start them
    vocab_size: int | None = None  # with what=memory; null: the tokenizer's (characters: 100, or the resumed run's)
    num_layers: int = 32  # for the model's total
    gpu: str = "h200"  # t4 | a100 | h100 | h200 | b200 | rtx4090 | any of kernels/device.py

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gpu = self.gpu.lower()  # NVIDIA writes H100
        refuse_unknown("", self, what=("attention", "memory"), element=(1, 2, 4, 8), gpu=BOARDS)
        sizes = "seq_len", "head_dim", "num_heads", "batch", "num_layers", "vocab_size", "processes"
        refuse_out_of_range("", self, *sizes)


@program("config", ExplainSettings, experiment="quickstart", run_dir=".")
def main(settings: ExplainSettings, run_dir: Path) -> None:
    refuse_other_keys(sys.argv[1:], settings.what, settings.model.mask)
    report, shown = explain_step(settings, run_dir) if settings.what == "memory" else explain_attention(settings)
    console = Console(width=130)
    for part in shown:
        if isinstance(part, Table):
            console.print(part)
        else:
            print(part)
    print(json.dumps(report))


def refuse_other_keys(typed: list[str], what: str, mask: str | None) -> None:
    """Raise ValueError for a typed key that only the other `what` reads: here it would have no effect."""
    of_one_layer = {*(field.name for field in fields(Shape)), "num_layers", "gpu"}
    known = of_one_layer | {"what", "model.mask"} | ({"model.window"} if mask is not None else set())
    of_one_layers = {of_a_run: key for key, of_a_run in OF_A_RUN.items()}
    for key in (key_of(argument) for argument in typed if argument[:1] != "-"):
        if what == "memory" and key in of_one_layer:
            other, instead = "attention", OF_A_RUN.get(key)
        elif what == "attention" and key not in known and not key.startswith("hydra"):
            other, instead = "memory", of_one_layers.get(key)
        else:
            continue
        raise ValueError(f"{key} is for what={other}; with what={what} {f'use {instead}' if instead else 'drop it'}")


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
    """What computing S again costs, as three shares. The often quoted 33 % is one product of three: the forward's two
    and the recomputed one, without the backward's own four."""
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

    standard: Q, K, V in, O out, and S and P each written once and read once. flash: queries outside, once as if the L2
    cache caught nothing, once as if it caught every read of K and V but the first.
    """
    return {
        "standard": 4 * shape.tensor_bytes + 4 * shape.matrix_bytes,
        "flash": sum(loop_order_bytes(shape)["queries outside (FA2)"].values()),
        "flash, K and V caught by L2": 4 * shape.tensor_bytes + shape.rows * STATISTIC,
    }


def mask_blocks(mask: str, window: int | None, seq_len: int) -> dict[str, int]:
    """Blocks of a head under model.mask, and those of causal attention."""
    counts = block_mask(mask_mod(mask, window), None, None, seq_len, seq_len, "cpu").counts()
    blocks = -(-seq_len // BLOCK)
    return counts | {"skipped": counts["blocks"] - counts["visited"], "causal": blocks * (blocks + 1) // 2}


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


# --- what is shown: a report for programs, tables and lines for people


def explain_attention(settings: ExplainSettings) -> tuple[dict, list[Table | str]]:
    gpu = BOARDS[settings.gpu]
    kept, counted, orders = memory(settings), flops(settings), loop_order_bytes(settings)
    report = {
        "shape": {field.name: getattr(settings, field.name) for field in fields(Shape)},
        "gpu": asdict(gpu),
        "memory": kept,
        "flops": counted | {"recomputation": recomputation_share(settings)},
        "roofline": roofline(settings, gpu),
        "loop_orders": orders,
    }
    in_layers = [f"{name} {settings.num_layers * sum(terms.values()) / GIB:.2f} GiB" for name, terms in kept.items()]
    passes = [{"pass": name, "flops": count, "of": 2 * count / counted["forward"]} for name, count in counted.items()]
    least = [row | {"mib": row["bytes"] / MIB, "ms": 1e3 * row["seconds"]} for row in report["roofline"]]
    peaks = f"{gpu.dense_flops / 1e12:.0f} TFLOP/s, {gpu.memory_bytes_per_second / 1e12:.2f} TB/s"
    shares = report["flops"]["recomputation"].items()
    masked = []
    if settings.model.mask is not None:
        report["mask"] = found = mask_blocks(settings.model.mask, settings.model.window, settings.seq_len)
        masked.append(
            "model.mask={mask}: of {blocks:,} blocks of 128 x 128 {visited:,} are visited, {partial:,} of them partial "
            "ones, and {skipped:,} skipped; causal attention visits {causal:,}.\n".format(
                mask=settings.model.mask, **found
            )
        )
    return report, [
        *masked,
        sizes(kept, MIB, 1, "memory that one layer keeps for its backward, MiB"),
        "standard: 4BHND + 2BHN^2 numbers; flash: 4BHND numbers and BHN float32 statistics. "
        f"{settings.num_layers} layers: {'; '.join(in_layers)}.\n",
        table(passes, {"pass": "{pass}"}, {"FLOPs": "{flops:.4g}", "products": "{of:.0f} x 2N^2D"}, "arithmetic"),
        *(f"computing S again is {share:.1%} {name}" for name, share in shares),
        table(
            least,
            {"": "{name}", "limited by": "{limit}"},
            {"HBM traffic, MiB": "{mib:,.1f}", "FLOPs a byte": "{flops_per_byte:.0f}", "least time, ms": "{ms:.3f}"},
            f"forward on {gpu.name}: {peaks}",
        ),
        f"The crossover of {gpu.name} is at {gpu.ridge:.0f} FLOPs a byte.\n",
        sizes(orders, MIB, 1, "HBM traffic of the two loop orders, forward, tiles of 128 x 128, without L2, MiB"),
    ]


def explain_step(settings: ExplainSettings, run_dir: Path) -> tuple[dict, list[Table | str]]:
    """A training step's memory: terms by moment, and activations by layer. run_dir: where resume=auto looks."""
    if (name := settings.model.name) is not None:
        raise ValueError(
            f"model.name={name} has layers of its own, of which nothing is known before they run; train.py says what "
            "it holds between steps, so leave what=memory out"
        )
    world = World(size=settings.processes)
    if torch.cuda.is_available() or settings.hardware.device == "cpu":
        hardware = replace(choose_hardware(settings.hardware), world=world)
    else:
        dtype, compiled = DTYPES.get(settings.hardware.dtype, torch.bfloat16), settings.hardware.compile is not False
        words = f"a GPU elsewhere, {dtype}, {'compiled' if compiled else 'eager'}"
        hardware = Hardware(torch.device("cuda"), dtype, compiled, words, world=world)
    vocab_size = number_of_tokens(settings, resume.find(settings.resume, run_dir, verify=(META,)))
    run = resolve(settings, vocab_size=vocab_size, hardware=hardware, world=world)
    model, plan = run.model, run.plan
    moments = {part: plan.kinds(part) for part in plan.peaks}
    layers = activations_by_layer(plan)
    report = {"peak_bytes": plan.peak, "fullest": plan.fullest, "moments": moments, "layers": layers}
    return report, [
        f"{run.micro_batch} x {run.seq_len:,} tokens at a time, {run.sequences // run.micro_batch} times a "
        f"step; {vocab_size:,} token ids; attention {model.attention}, loss {model.loss}, checkpointing "
        f"{model.activation_checkpointing}, {settings.optim.name}; {run.hardware.description}",
        sizes(moments, GIB, 3, "GiB at the fullest moment of each part of the step"),
        sizes(dict(enumerate(layers)), MIB, 1, "activations of each layer when the forward is fullest, MiB, by module"),
        str(plan),
    ]


def number_of_tokens(settings: ExplainSettings, resumed: Checkpoint | None) -> int:
    """Token ids of the tokenizer, or of the resumed run. Raises ValueError where that cannot go on with `settings`."""
    name, state = settings.tokenizer, None
    if resumed is None:
        return settings.vocab_size or VOCABULARY.get(name) or build_tokenizer(name).n_vocab
    if name == resumed.meta["tokenizer"]["name"]:  # `characters` are known only from the run's text
        state = resumed.meta["tokenizer"]
    elif name not in VOCABULARY:  # a folder, which may hold the same tokenizer
        state = tokenizer_state(build_tokenizer(name))
    vocab_size = settings.vocab_size or resumed.meta["vocab_size"]
    resume.refuse_unless_same(resumed, asdict(settings), state or {"name": name, "alphabet": ""}, vocab_size)
    return vocab_size


def activations_by_layer(plan: Plan) -> list[dict[str, int]]:
    """Bytes that each block holds at the forward's fullest moment, by module; `block` itself is the residual stream."""
    layers: list[dict[str, int]] = [{} for _ in range(plan.model.num_layers)]
    for (kind, module), size in plan.peaks["forward"].items():
        if kind == "activations" and module.startswith("blocks."):
            _, number, *inside = module.split(".")
            layers[int(number)][".".join(inside) or "block"] = size
    return layers


def sizes(found: dict[Any, dict[str, float]], unit: int, digits: int, title: str) -> Table:
    """A line for each name: its terms, in units of `unit` bytes, and their sum."""
    headings = list(dict.fromkeys(heading for terms in found.values() for heading in terms))
    lines = []
    for name, terms in found.items():
        bytes_ = *(terms.get(heading, 0) for heading in headings), sum(terms.values())
        lines.append([str(name), *(f"{size / unit:,.{digits}f}" for size in bytes_)])
    return Table(1, ["", *headings, "in all"], lines, title)


if __name__ == "__main__":
    main()
