"""The arithmetic behind flash attention: `python -m scripts.explain seq_len=4096 head_dim=128 num_heads=32 gpu=h200`.

Prints memory term by term, FLOPs, HBM traffic and arithmetic intensity, which side of the GPU's roofline each falls
on, shared memory of tiles, and the two loop orders; formulas and sources are in training/arithmetic.py. Where there is
a GPU, the predicted time and memory stand beside measured ones. The last line is one JSON object.

`what=memory` explains instead what a training step holds on a GPU, for the arguments that train.py would get:
`python -m scripts.explain what=memory experiment=long_context model.attention=naive`. What is held at the fullest
moment of forward, backward and optimizer, by kind, and by each layer's modules: what training/tracker.py sees.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from conf.program import program
from conf.schema import Settings
from kernels import flash_attention, naive_attention, tiled_attention, why_not
from kernels.call import Options
from kernels.tiled import tile_order
from model.config import resolve_loss
from scripts.bench.clock import measure
from training import arithmetic
from training.arithmetic import GPUS, Shape
from training.hardware import DTYPES, Hardware, set_up
from training.memory import GIB, Plan, plan

FULL = Options(causal=False, scale=1.0)
VOCABULARY = {"bytes": 257, "characters": 100, "gpt2": 50257}  # token ids of each tokenizer
TILES = ((64, 64), (128, 64), (128, 128), (128, 256), (256, 128))


@dataclass
class ExplainSettings(Settings):
    what: str = "attention"  # attention | memory (of a training step)
    vocab_size: int | None = None  # with what=memory; null: the tokenizer's (of characters: a hundred)
    seq_len: int = 4096
    head_dim: int = 128
    num_heads: int = 32
    batch: int = 1
    num_layers: int = 32  # for the model's total
    element: int = 2  # bytes of a number
    causal: bool = False
    gpu: str = "h200"  # t4 | a100 | h100 | h200 | b200 | rtx4090

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.what not in ("attention", "memory"):
            raise ValueError(f"what={self.what} is unknown; use attention or memory")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size} must be at least 1, or null")
        for key in ("seq_len", "head_dim", "num_heads", "batch", "num_layers", "element"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        if self.gpu not in GPUS:
            raise ValueError(f"gpu={self.gpu} is not in the table; use one of {', '.join(GPUS)}")


@program("config", ExplainSettings, experiment="quickstart", run_dir=".")
def main(settings: ExplainSettings, run_dir: Path) -> None:
    console = Console(highlight=False, width=110)
    if settings.what == "memory":
        print(json.dumps(show_step_memory(console, settings)))
        return
    shape = Shape(
        settings.batch, settings.num_heads, settings.seq_len, settings.head_dim, settings.element, settings.causal
    )
    gpu = GPUS[settings.gpu]
    report = {"shape": asdict(shape), "gpu": asdict(gpu)}
    report["memory"] = show_memory(console, shape, settings.num_layers)
    report["flops"] = show_flops(console, shape)
    report["roofline"] = show_roofline(console, shape, gpu)
    report["tiles"] = show_tiles(console, shape, gpu)
    report["loop_orders"] = show_loop_orders(console, shape)
    device = set_up(settings.hardware).device
    if device.type == "cuda":
        report["measured"] = show_measured(console, shape, gpu, device)
    print(json.dumps(report))


def show_memory(console: Console, shape: Shape, num_layers: int) -> dict:
    found = arithmetic.memory(shape)
    table = Table(title="memory that one layer keeps for its backward")
    for column in ("", "terms", "one layer", f"{num_layers} layers"):
        table.add_column(column, justify="left" if column in ("", "terms") else "right")
    for name, terms in found.items():
        parts = " + ".join(f"{term} {size_of(bytes_)}" for term, bytes_ in terms.items())
        total = sum(terms.values())
        table.add_row(name, parts, size_of(total), size_of(num_layers * total))
    console.print(table)
    console.print("standard: 4BHND + 2BHN^2 numbers; flash: 4BHND numbers and BHN float32 statistics.\n")
    return found


def show_step_memory(console: Console, settings: ExplainSettings) -> dict:
    """Terms by moment and activations by layer of one training step on CUDA; what is free where there is a GPU."""
    dtype = DTYPES.get(settings.hardware.dtype, torch.bfloat16)
    features = settings.model.attention_features(settings.data.document_mask)
    model = replace(settings.model, loss=resolve_loss(settings.model.loss, "cuda")[0])
    if model.attention == "auto":
        model.attention = "flash" if why_not("flash", dtype, features) is None else "naive"
    compiled = settings.hardware.compile is not False
    hardware = Hardware(torch.device("cuda"), dtype, compiled, "a GPU, here or elsewhere")
    vocab_size = settings.vocab_size or VOCABULARY[settings.tokenizer]
    made = plan(settings, model, hardware, vocab_size)
    console.print(
        f"{made.micro_batch} x {made.seq_len:,} tokens at a time, {made.sequences // made.micro_batch} times a step; "
        f"{vocab_size:,} token ids; attention {model.attention}, loss {model.loss}, checkpointing "
        f"{model.activation_checkpointing}, {dtype}, {settings.optim.name}; {'compiled' if compiled else 'eager'}",
        markup=False,
    )
    kinds = {part: made.kinds(part) for part in made.moments}
    table = Table(title="GiB at the fullest moment of each part of the step")
    for column in ("", *kinds):
        table.add_column(column, justify="right" if column else "left")
    for kind in dict.fromkeys(kind for terms in kinds.values() for kind in terms):
        table.add_row(kind, *(f"{terms.get(kind, 0) / GIB:.3f}" for terms in kinds.values()))
    table.add_row("in all", *(f"{sum(terms.values()) / GIB:.3f}" for terms in kinds.values()), style="bold")
    console.print(table)
    layers = activations_by_layer(made)
    modules = list(dict.fromkeys(module for terms in layers for module in terms))
    table = Table(title="activations of each layer at the forward's fullest moment, MiB, by the module that made them")
    for column in ("layer", *modules, "in all"):
        table.add_column(column, justify="right")
    for number, terms in enumerate(layers):
        parts = (f"{terms.get(module, 0) / 2**20:,.1f}" for module in modules)
        table.add_row(str(number), *parts, f"{sum(terms.values()) / 2**20:,.1f}")
    console.print(table)
    console.print(str(made), markup=False, soft_wrap=True)
    return {"peak_bytes": made.peak, "fullest": made.fullest, "moments": kinds, "layers": layers}


def activations_by_layer(made: Plan) -> list[dict[str, int]]:
    """Bytes at the forward's fullest moment that each block holds, by its module; its own are the residual stream."""
    layers: list[dict[str, int]] = [{} for _ in range(made.model.num_layers)]
    for (kind, module), size in made.moments["forward"].items():
        if kind == "activations" and module.startswith("blocks."):
            _, number, *inside = module.split(".")
            layers[int(number)][".".join(inside) or "block"] = size
    return layers


def show_flops(console: Console, shape: Shape) -> dict:
    found = arithmetic.flops(shape)
    table = Table(title="arithmetic")
    for column in ("pass", "FLOPs", "products"):
        table.add_column(column, justify="left" if column == "pass" else "right")
    for (name, count), products in zip(found.items(), (2, 4, 5), strict=True):
        table.add_row(name, f"{count:.4g}", f"{products} x 2N^2D")
    console.print(table)
    shares = arithmetic.recomputation_share(shape)
    for name, share in shares.items():
        console.print(f"computing S again is {share:.1%} {name}", markup=False)
    console.print()
    return found | {"recomputation": shares}


def show_roofline(console: Console, shape: Shape, gpu: arithmetic.GPU) -> dict:
    moved, intensity = arithmetic.hbm_bytes(shape), arithmetic.intensity(shape)
    seconds = arithmetic.predicted_seconds(shape, gpu)
    table = Table(title=f"forward on {gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s")
    for column in ("", "HBM traffic", "FLOPs a byte", "limited by", "least time"):
        table.add_column(column, justify="left" if column in ("", "limited by") else "right")
    for name, bytes_ in moved.items():
        limit = "arithmetic" if intensity[name] > gpu.ridge else "memory"
        table.add_row(name, size_of(bytes_), f"{intensity[name]:.0f}", limit, f"{1e3 * seconds[name]:.3f} ms")
    console.print(table)
    console.print(f"The crossover of {gpu.name} is at {gpu.ridge:.0f} FLOPs a byte.\n", markup=False)
    return {"bytes": moved, "intensity": intensity, "seconds": seconds, "ridge": gpu.ridge}


def show_tiles(console: Console, shape: Shape, gpu: arithmetic.GPU) -> list[dict]:
    table = Table(
        title=f"shared memory of a tile, K and V twice; {gpu.name} has {gpu.shared_bytes // 1024} KiB a block"
    )
    for column in ("queries x keys", "terms, KiB", "KiB", "fits"):
        table.add_column(column, justify="right" if column == "KiB" else "left")
    rows = []
    for block_q, block_k in TILES:
        terms = arithmetic.tile_bytes(block_q, block_k, shape.head_dim, shape.element)
        total = sum(terms.values())
        registers = total - terms["S"] - terms["O"]
        fits = (
            "yes"
            if total <= gpu.shared_bytes
            else "with S and O in registers"
            if registers <= gpu.shared_bytes
            else "no"
        )
        parts = ", ".join(f"{name} {size / 1024:.0f}" for name, size in terms.items())
        table.add_row(f"{block_q} x {block_k}", parts, f"{total / 1024:.0f}", fits)
        rows.append({"block_q": block_q, "block_k": block_k, "bytes": terms, "fits": fits})
    console.print(table)
    console.print()
    return rows


def show_loop_orders(console: Console, shape: Shape) -> dict:
    found = arithmetic.loop_order_bytes(shape)
    table = Table(title="HBM traffic of the two loop orders, forward, tiles of 128 x 128, nothing caught by L2")
    for column in ("outer loop", "terms", "in all"):
        table.add_column(column, justify="right" if column == "in all" else "left")
    for name, terms in found.items():
        parts = ", ".join(f"{term} {size_of(bytes_)}" for term, bytes_ in terms.items())
        table.add_row(name, parts, size_of(sum(terms.values())))
    console.print(table)
    q, k, v = torch.randn(3, 1, 1, 512, 64).unbind()
    outputs = {}
    for outer in ("keys", "queries"):
        outputs[outer] = tiled_attention(q, k, v, outer=outer)
        rows, cols = arithmetic.tile_loads(tile_order(512, 512, FULL, 128, 128, outer))
        console.print(f"512 tokens with {outer} outside: rows and their state taken up {rows} times, keys {cols} times")
    same = torch.equal(outputs["keys"], outputs["queries"])
    console.print(f"The PyTorch reference ran in both orders: {'the same bits' if same else 'DIFFERENT NUMBERS'}.\n")
    return found | {"same_bits": same}


def show_measured(console: Console, shape: Shape, gpu: arithmetic.GPU, device: torch.device) -> dict:
    """Time and extra memory of a forward, beside the roofline of the named GPU."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[shape.element]
    size = (shape.batch, shape.seq_len, shape.num_heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    predicted = arithmetic.predicted_seconds(shape, gpu)
    table = Table(title=f"measured on {torch.cuda.get_device_name(device)}")
    for column in ("", "time", "roofline", "memory beyond the inputs"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {}
    for name, attention in (("standard", naive_attention), ("flash", flash_attention)):
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        try:
            with torch.no_grad():
                attention(q, k, v, causal=shape.causal)
                peak = torch.cuda.max_memory_allocated(device) - held
                ms = measure(lambda a=attention: a(q, k, v, causal=shape.causal), device).p50
        except torch.OutOfMemoryError:
            table.add_row(name, "out of memory", f"{1e3 * predicted[name]:.3f} ms", "-")
            continue
        best = predicted["flash, K and V caught by L2" if name == "flash" else name]
        table.add_row(name, f"{ms:.3f} ms", f"{1e3 * best:.3f} ms", size_of(peak))
        rows[name] = {"ms": ms, "roofline_ms": 1e3 * best, "extra_bytes": peak}
    console.print(table)
    return rows


def size_of(bytes_: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= factor:
            return f"{bytes_ / factor:,.4g} {unit}"
    return f"{bytes_:.0f} B"


if __name__ == "__main__":
    main()
