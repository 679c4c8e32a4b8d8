"""Every plan that the attention launchers can choose on a GPU, and how Triton compiles one without the GPU.

A plan is a kernel with its constants: head_dim's tiles, mask, options, warps and stages. `plans` reads the engines' own
tables (kernels/portable/tuning.py; `plan_for` in kernels/hopper/). To each portable kernel it adds the code that only
some inputs need: lengths that are whole tiles ("even"), grouped queries, loads by pointers, float16, a head_dim that is
padded or wider for V, ALiBi, sinks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.call import Options
from kernels.hopper import backward_kernel, fp8_kernel
from kernels.hopper import forward as hopper_forward
from kernels.launch import Switches
from kernels.portable import decode, dkdv, dq, forward
from kernels.portable.tuning import Tile, decode_tile, table_for, table_tile

ARCHS = (80, 86, 89, 90, 100, 120)  # compute capabilities x 10
KERNELS = {
    "fwd": forward.flash_fwd_kernel,
    "dkdv": dkdv.flash_dkdv_kernel,
    "dq": dq.flash_dq_kernel,
    "decode": decode.flash_decode_kernel,
    "hopper_fwd": hopper_forward.hopper_fwd_kernel,
    "hopper_bwd": backward_kernel.hopper_bwd_kernel,
    "hopper_fp8": fp8_kernel.hopper_fp8_kernel,
}
# what an option switches on: the fields of `Switches` that are then not None, with their types
SWITCHED_ON = {
    "softcap": {"softcap": "fp32"},
    "alibi": {"alibi_slopes": "*fp32"},
    "sinks": {"sinks": "*fp32"},
    "dropout": {"dropout_seed": "*i64", "dropout_p": "fp32"},
    "varlen": {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"},
}
FLOAT32_POINTERS = ("lse_ptr", "dlse_ptr", "lse_log2_ptr", "delta_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr")


@dataclass(frozen=True)
class Plan:
    """A kernel and all that Triton specialises it for."""

    kernel: str  # a key of KERNELS
    arch: int
    dtype: str  # "bf16", "fp16", "fp32" or "fp8e4nv"
    head_dim: int
    mask: str  # "causal", "full" or "window"
    options: tuple[str, ...] = ()  # keys of SWITCHED_ON; "even", "grouped", "pointers", "wider": see `portable_plans`
    constants: dict = field(default_factory=dict)
    launch: dict = field(default_factory=lambda: {"num_warps": 4})

    @property
    def name(self) -> str:
        """One line that no other plan has, without what follows from the rest."""
        c, how = self.constants, self.launch
        words = [self.kernel, str(self.arch), str(self.head_dim), self.dtype, self.mask, *self.options]
        if "BLOCK_Q" in c:
            words += [f"{c['BLOCK_Q']}x{c['BLOCK_K']}", f"w{how['num_warps']}", f"s{how['num_stages']}"]
        if "CONSUMERS" in c:
            words += [f"{c['CONSUMERS']}x64x{c['BLOCK_K']}", f"s{c['STAGES']}"]
        return " ".join(words + [word.lower() for word in ("TMA", "PING_PONG", "PAIRED") if c.get(word)])


def plans(arch: int) -> list[Plan]:
    """All plans of both engines on compute capability arch / 10."""
    found = [*portable_plans(arch), *decode_plans(arch)]
    if arch == 90:
        found += [*hopper_forward_plans(), *hopper_backward_plans(), *hopper_fp8_plans()]
    return list({plan.name: plan for plan in found}.values())


def portable_plans(arch: int) -> list[Plan]:
    """A plan for each line of the tuning table, and those for what only some inputs need."""
    found = []
    tables = {dtype: table_for(divmod(arch, 10), size) for dtype, size in (("bf16", 2), ("fp32", 4))}
    for dtype, table in tables.items():
        for (kernel, head_dim, variant), tile in table.items():
            options = (variant,) if variant in SWITCHED_ON else ()
            mask = variant if variant in ("full", "window") else "causal"
            found.append(portable_plan(kernel, arch, dtype, head_dim, mask, options, tile))
    for kernel in ("fwd", "dkdv", "dq"):
        for head_dim, dtype, mask, options in (
            (64, "bf16", "causal", ("even",)), (64, "bf16", "full", ("even",)), (64, "bf16", "causal", ("grouped",)),
            (64, "bf16", "window", ()), (64, "bf16", "window", ("alibi",)), (64, "bf16", "causal", ("alibi", "sinks")),
            (64, "bf16", "full", ("softcap",)), (64, "bf16", "full", ("dropout",)), (64, "fp16", "full", ("varlen",)),
            (64, "bf16", "window", ("softcap", "alibi", "sinks", "dropout", "varlen")),
            (64, "bf16", "causal", ("pointers", "varlen")), (48, "bf16", "window", ("pointers",)),
            (48, "bf16", "causal", ("pointers", "even", "wider")),
        ):  # fmt: skip
            variant = next((v for v in ("dropout", "softcap", "varlen") if v in options), mask)
            tile = table_tile(kernel, divmod(arch, 10), 2, head_dim, variant)
            found.append(portable_plan(kernel, arch, dtype, head_dim, mask, options, tile))
    return found


def portable_plan(
    kernel: str, arch: int, dtype: str, head_dim: int, mask: str, options: tuple[str, ...], tile: Tile
) -> Plan:
    head_dim_v = head_dim + 16 if "wider" in options else head_dim
    constants = {
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_DV": triton.next_power_of_2(head_dim_v),
        "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "CAUSAL": mask == "causal", "LOCAL": mask == "window",
        "EVEN_Q": "even" in options, "EVEN_K": "even" in options, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "TMA": tile.tma and "pointers" not in options,
    }  # fmt: skip
    taken = {name: value for name, value in constants.items() if name in KERNELS[kernel].arg_names}
    launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Plan(kernel, arch, dtype, head_dim, mask, options, taken, launch)


def decode_plans(arch: int) -> Iterator[Plan]:
    """One for each tile of `decode_tile`, and for what else changes the code: pages, 8 bits, options, no append."""
    sizes = {"bf16": torch.bfloat16, "fp32": torch.float32, "i8": torch.int8, "fp8e4nv": torch.float8_e4m3fn}
    for head_dim, rows, cached, page, scales, options in (
        (64, 16, "bf16", 0, 0, ()), (80, 16, "bf16", 0, 0, ()), (128, 16, "bf16", 0, 0, ()),
        (256, 16, "bf16", 0, 0, ()), (128, 32, "bf16", 0, 0, ()), (128, 64, "bf16", 0, 0, ()),
        (64, 16, "bf16", 16, 0, ()), (128, 16, "bf16", 64, 0, ()), (128, 16, "i8", 0, 1, ()),
        (128, 16, "i8", 16, 2, ()), (128, 16, "fp8e4nv", 0, 2, ()), (64, 16, "fp8e4nv", 64, 1, ()),
        (128, 16, "fp32", 0, 0, ()), (128, 16, "bf16", 0, 0, ("read only",)),
        (128, 16, "bf16", 16, 0, ("softcap", "alibi", "sinks", "padded")),
    ):  # fmt: skip
        if cached == "fp8e4nv" and arch < 89:
            continue
        tile = decode_tile(sizes[cached], head_dim, rows, page > 0)
        dtype = cached if cached == "fp32" else "bf16"
        absent = {"k_scale": not scales, "v_scale": not scales, "leftpad": "padded" not in options}
        absent |= {"block_table": not page} | dict.fromkeys(("k_new", "v_new"), "read only" in options)
        constants = {
            "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": rows,
            "BLOCK_K": tile.block_k, "SPAN": tile.span, "GROUPS": tile.groups, "PAGE": page, "SCALES": scales,
            "UNIT": 16 // (4 if dtype == "fp32" else 2), "CACHE_UNIT": 16 // sizes[cached].itemsize,
            "APPEND": "read only" not in options, "CAUSAL": "padded" not in options, "LOCAL": "padded" in options,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        } | {name: None for name, true in absent.items() if true}  # fmt: skip
        words = (f"{rows} rows", f"cache {cached}", f"page {page}", f"scales {scales}", *options)
        yield Plan("decode", arch, dtype, head_dim, "causal", words, constants, tile.how)


def decode_types(plan: Plan) -> dict[str, str]:
    """Types of the pointers that `type_of` does not know by their names."""
    cached = next(word for word in plan.options if word.startswith("cache ")).split()[1]
    types = dict.fromkeys(("seqlens", "leftpad", "block_table", "workspace"), "*i32")
    types |= dict.fromkeys(("k_scale", "v_scale", "lse", "sums", "maxima"), "*fp32")
    return (
        types
        | dict.fromkeys(("k_cache", "v_cache"), f"*{cached}")
        | dict.fromkeys(("k_new", "v_new", "o"), f"*{plan.dtype}")
    )


def hopper_forward_plans() -> list[Plan]:
    """What `plan_for` returns at any length, in pairs of tiles or not; in float16 for one mask."""
    found = []
    documents = torch.zeros(2, dtype=torch.int32)
    for head_dim, mask, softcap, varlen, num_q, dtype in product(
        (64, 128, 256), ("causal", "full", "window"), (False, True), (False, True), (1024, 2048, 4096, 8192, 16384),
        ("bf16", "fp16"),
    ):  # fmt: skip
        if dtype == "fp16" and (mask, softcap, varlen) != ("causal", False, False):
            continue
        options = Options(mask == "causal", 1.0, 1 if mask == "window" else -1, softcap=5.0 if softcap else 0.0)
        options = options._replace(cu_seqlens_q=documents if varlen else None)
        plan = hopper_forward.plan_for(head_dim, options, num_q)
        named = tuple(name for name, on in (("softcap", softcap), ("varlen", varlen)) if on)
        pairs = plan.persistent and options.causal and not varlen
        switches = {"LOCAL": options.local} | off_unless(named, "softcap", "varlen")
        found += hopper_plans("hopper_fwd", dtype, head_dim, mask, plan, pairs, named, switches)
    return found


def hopper_backward_plans() -> list[Plan]:
    """One for each head_dim and mask; lengths choose the grid alone."""
    return [
        Plan(
            "hopper_bwd", 90, dtype, head_dim, "causal" if causal else "full", (),
            {"HEAD_DIM": head_dim, "STAGES": 3, "CAUSAL": causal},
        )
        for head_dim, causal, dtype in product((64, 128), (True, False), ("bf16", "fp16"))
    ]  # fmt: skip


def hopper_fp8_plans() -> list[Plan]:
    found = []
    for head_dim, causal in product((64, 128), (True, False)):
        plan = fp8_kernel.plan_for(head_dim, causal)
        mask = "causal" if causal else "full"
        found += hopper_plans("hopper_fp8", "fp8e4nv", head_dim, mask, plan, plan.persistent and causal)
    return found


def hopper_plans(
    kernel: str, dtype: str, head_dim: int, mask: str, plan: Any, pairs: bool, options=(), more: dict | None = None
) -> Iterator[Plan]:
    """A forward's plan, and with `pairs` the same one for pairs of tiles."""
    for paired in {False, pairs}:
        constants = {
            "HEAD_DIM": head_dim, "BLOCK_K": plan.block_k, "CONSUMERS": plan.consumers, "STAGES": plan.stages,
            "CAUSAL": mask == "causal", "PING_PONG": plan.ping_pong, "PAIRED": paired,
        }  # fmt: skip
        yield Plan(kernel, 90, dtype, head_dim, mask, options, constants | (more or {}))


def off_unless(switched_on: tuple[str, ...], *options: str) -> dict:
    """The parameters of these options that are None, because the plan does not switch them on."""
    return {name: None for option in options if option not in switched_on for name in SWITCHED_ON[option]}


def source_of(plan: Plan) -> ASTSource:
    """What `triton.compile` takes: types, constants and alignment of a launch on dense (B, N, H, D) tensors."""
    kernel = KERNELS[plan.kernel]
    types = {name: kind for option in plan.options for name, kind in SWITCHED_ON.get(option, {}).items()}
    hopper = plan.kernel.startswith("hopper")
    if plan.kernel == "decode":
        descriptors = decode_types(plan)
    else:
        descriptors = hopper_descriptors(plan) if hopper else portable_descriptors(plan)
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in plan.constants:
            signature[name], constexprs[(i,)] = "constexpr", plan.constants[name]
        elif name == "group_size" and not hopper and "grouped" not in plan.options:
            signature[name], constexprs[(i,)] = "constexpr", 1
        elif name == "switches":
            signature[name] = Switches(*(types.get(field, "constexpr") for field in Switches._fields))
            constexprs |= {(i, j): None for j, kind in enumerate(signature[name]) if kind == "constexpr"}
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32")
            attributes |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        else:
            signature[name] = descriptors.get(name) or types.get(name) or type_of(name, plan.dtype)
            if signature[name].startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    return (GluonASTSource if hopper else ASTSource)(kernel, signature, constexprs, attributes)


def type_of(name: str, dtype: str) -> str:
    """The type of a parameter that is neither constant nor descriptor nor option."""
    if name in FLOAT32_POINTERS:
        return "*fp32"
    if name in ("scale", "scale_log2"):
        return "fp32"
    if name == "turns_ptr":
        return "*i32"
    return f"*{dtype}" if name in ("q", "k", "v", "do") or name.endswith("_ptr") else "i32"


def portable_descriptors(plan: Plan) -> dict[str, str]:
    """Types of the operands that TMA loads; none where pointers do."""
    c = plan.constants
    if not c["TMA"]:
        return {}
    leading = "1, 1, 1" if "varlen" in plan.options else "1, 1"
    tiles = {
        "q": (c["BLOCK_Q"], c["BLOCK_D"]), "do": (c["BLOCK_Q"], c["BLOCK_DV"]),
        "k": (c["BLOCK_K"], c["BLOCK_D"]), "v": (c["BLOCK_K"], c["BLOCK_DV"]),
    }  # fmt: skip
    return {name: f"tensordesc<{plan.dtype}[{leading}, {rows}, {cols}]>" for name, (rows, cols) in tiles.items()}


def hopper_descriptors(plan: Plan) -> dict[str, str]:
    """Types of everything that TMA moves, and of dQ's sum."""
    head_dim, block_k = plan.head_dim, plan.constants.get("BLOCK_K", 128)
    outer = [1, 1, 1] if "varlen" in plan.options else [1, 1]
    rows = {"q": 64, "do": 64, "o": 64, "k": block_k, "v": block_k, "dk": head_dim, "dv": head_dim}
    shapes = {name: [*outer, count, head_dim] for name, count in rows.items()} | {"lse": [1, 64], "delta": [1, 64]}
    dtypes = {"lse": "fp32", "delta": "fp32"}
    if plan.kernel == "hopper_fp8":
        shapes["v"], dtypes["o"] = [*outer, head_dim, block_k], "bf16"
    types = {"dq_ptr": "*fp32"}
    for name, shape in shapes.items():
        dtype = dtypes.get(name, plan.dtype)
        types[f"{name}_desc"] = f"tensordesc<{dtype}{shape},{shared_layout(shape, dtype)!r}>"
    return types


def shared_layout(shape: list[int], dtype: str):
    gluon_dtype = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv}[dtype]
    return gl.NVMMASharedLayout.get_default_for(shape, gluon_dtype)
