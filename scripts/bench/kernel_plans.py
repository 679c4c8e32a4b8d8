"""Every plan of attention on a GPU and the products of generation, and how Triton compiles one without the GPU.

A plan is a kernel with its constants: head_dim's tiles, mask, options, warps and stages. The launchers themselves say
what they would launch: they are called on tensors without memory, and `kernels.launch.recorded` keeps their launches.
The portable kernels are called for each line of their table of tiles, and for the code that only some inputs need:
lengths that are whole tiles ("even"), grouped queries, loads by pointers, float16, a head_dim that is padded or wider
for V, ALiBi, sinks. The Hopper kernels are called with each option that they support.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from kernels import BlockMask
from kernels.call import Options
from kernels.decode import Call, kvcache_workspace
from kernels.fused.draw_tokens_kernels import launch_draw_tokens
from kernels.fused.skinny_linear_kernel import launch_skinny_linear
from kernels.hopper.backward import launch_hopper_bwd
from kernels.hopper.decode import launch_hopper_decode
from kernels.hopper.forward import launch_hopper_fwd
from kernels.launch import Launch, recorded
from kernels.portable.backward import launch_flash_bwd
from kernels.portable.decode import launch_flash_decode
from kernels.portable.forward import launch_flash_fwd
from kernels.portable.tuning import table_for, table_tile, variant_of

ARCHS = (80, 86, 89, 90, 100, 120)  # compute capabilities x 10
KERNELS = {  # the main ones; kernels that run before and after them are no plans
    "flash_fwd_kernel": "fwd",
    "flash_dkdv_kernel": "dkdv",
    "flash_dq_kernel": "dq",
    "flash_decode_kernel": "decode",
    "skinny_linear_kernel": "skinny",
    "one_row_linear_kernel": "skinny",
    "draw_few_kernel": "draw",
    "draw_any_kernel": "draw",
    "likeliest_kernel": "draw",
    "hopper_fwd_kernel": "hopper_fwd",
    "hopper_bwd_kernel": "hopper_bwd",
    "hopper_decode_kernel": "hopper_decode",
}
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn,
    "int8": torch.int8,
}  # fmt: skip
MASK_TENSORS = BlockMask._fields[:3]
BLOCK_MASKS = (("block_mask",), ("block_mask", "softcap"))
ALIBI = (("alibi",), ("varlen", "alibi"))
# what only some inputs of the portable kernels need: (head_dim, dtype, mask, words)
SPECIAL = (
    (64, "bf16", "causal", ("even",)), (64, "bf16", "full", ("even",)), (64, "bf16", "causal", ("grouped",)),
    (64, "bf16", "window", ()), (128, "bf16", "window", ()), (64, "bf16", "window", ("alibi",)),
    (64, "bf16", "causal", ("alibi", "sinks")),
    (64, "bf16", "full", ("softcap",)), (64, "bf16", "full", ("dropout",)), (64, "fp16", "full", ("varlen",)),
    (64, "bf16", "window", ("softcap", "alibi", "sinks", "dropout", "varlen")),
    (64, "bf16", "causal", ("pointers", "varlen")), (48, "bf16", "window", ("pointers",)),
    (48, "bf16", "causal", ("pointers", "even", "wider")), (48, "bf16", "full", ("pointers", "block_mask")),
    (128, "fp32", "full", ("block_mask",)),  # tiles of 16 columns, which are half a word of a pattern
)  # fmt: skip


@lru_cache
def plans(arch: int) -> dict[str, Launch]:
    """All plans of both engines, and of generation's products and draws, on capability arch / 10, by their names."""
    found = {}
    hopper = hopper_calls() if arch == 90 else ()
    for words, launches in (*portable_calls(arch), *decode_calls(arch), *skinny_calls(arch), *draw_calls(), *hopper):
        for launch in launches:
            if kernel := KERNELS.get(launch.kernel.__name__):
                found[f"{kernel} {arch} {name(words, launch)}"] = launch
                # without a GPU every persistent grid is paired; with one, that of few tiles is not
                if launch.constants.get("PAIRED"):
                    launch = launch._replace(constants=launch.constants | {"PAIRED": False})
                    found[f"{kernel} {arch} {name(words, launch)}"] = launch
    return found


def name(words: tuple[str, ...], launch: Launch) -> str:
    constants, how = launch.constants, launch.how
    words = [str(constants.get("K") or constants.get("V") or constants["HEAD_DIM"]), *words]
    if "BLOCK_Q" in constants:
        words += [f"{constants['BLOCK_Q']}x{constants['BLOCK_K']}", f"w{how['num_warps']}", f"s{how['num_stages']}"]
    if "CONSUMERS" in constants:
        words += [f"{constants['CONSUMERS']}x64x{constants['BLOCK_K']}", f"s{constants['STAGES']}"]
    return " ".join(words + [word.lower() for word in ("TMA", "PING_PONG", "PAIRED") if constants.get(word)])


def portable_calls(arch: int) -> Iterator[tuple[tuple[str, ...], list[Launch]]]:
    """Yield each call in words, and its launches."""
    calls = list(SPECIAL)
    for dtype in ("bf16", "fp32"):
        for _, head_dim, variant in table_for(divmod(arch, 10), DTYPES[dtype].itemsize):
            mask = variant if variant in ("full", "window") else "full" if variant == "block_mask" else "causal"
            words = (variant,) if variant in ("softcap", "dropout", "varlen", "block_mask") else ()
            calls.append((head_dim, dtype, mask, words))
    for head_dim, dtype, mask, words in calls:
        q, k, v, options = call(head_dim, dtype, mask, words)
        which = divmod(arch, 10), q.itemsize, head_dim, variant_of(options)
        tiles = [table_tile(kernel, *which) for kernel in ("fwd", "dkdv", "dq")]
        if "pointers" in words:
            tiles = [replace(tile, tma=False) for tile in tiles]
        with recorded() as launches:
            o, lse = launch_flash_fwd(q, k, v, options, tiles[0])
            launch_flash_bwd(o, None, q, k, v, o, lse, options, *tiles[1:])
        yield (dtype, mask, *words), launches


def decode_calls(arch: int) -> Iterator[tuple[tuple[str, ...], list[Launch]]]:
    """Appending calls over a cache of this head_dim, rows that share a KV head, dtype, page, scales and options."""
    for head_dim, rows, dtype, page, scales, words in (
        (64, 1, "bf16", 0, 0, ()), (80, 1, "bf16", 0, 0, ()), (128, 1, "bf16", 0, 0, ()), (256, 1, "bf16", 0, 0, ()),
        (64, 32, "bf16", 0, 0, ()), (128, 32, "bf16", 0, 0, ()), (128, 64, "bf16", 0, 0, ()),
        (64, 1, "bf16", 16, 0, ()), (64, 1, "bf16", 128, 0, ()), (128, 1, "bf16", 64, 0, ()),
        (128, 1, "int8", 0, 1, ()), (128, 1, "int8", 16, 3, ()), (128, 1, "fp8e4nv", 0, 3, ()),
        (64, 1, "fp8e4nv", 64, 1, ()), (128, 1, "fp32", 0, 0, ()),
        (128, 1, "bf16", 16, 0, ("softcap", "alibi", "sinks")),
    ):  # fmt: skip
        if dtype == "fp8e4nv" and arch < 89:
            continue
        kind = "fp32" if dtype == "fp32" else "bf16"
        *_, options = call(head_dim, kind, "causal", words)
        q, new = (torch.empty(1, n, 1, head_dim, dtype=DTYPES[kind], device="meta") for n in (4 * rows, 4))
        cache = torch.empty(8, 4, page or 1000, head_dim, dtype=DTYPES[dtype], device="meta")[: 8 if page else 1]
        scale = torch.empty(cache.shape[1:2] if scales == 1 else cache.shape[:3], device="meta") if scales else None
        lengths, table = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((1,), (1, 8)))
        workspace = kvcache_workspace(1, 4 * rows, "meta")
        tensors = Call(q, cache, cache, new, new, lengths, None, table if page else None, scale, scale, workspace)
        if "alibi" in words:
            options = options._replace(alibi_slopes=options.alibi_slopes[:, : 4 * rows])
        with recorded() as launches:
            launch_flash_decode(tensors, options)
            if arch == 90 and (dtype == "bf16" or (cache.itemsize == 1 and head_dim > 64)) and head_dim <= 128:
                launch_hopper_decode(tensors, options)
        yield (dtype, f"{rows} rows", f"page {page}", f"scales {scales}", *words), launches


def skinny_calls(arch: int) -> Iterator[tuple[tuple[str, ...], list[Launch]]]:
    """GPT-2 124M's products of a step: outputs, rows, activation or rotary."""
    for width, outputs, rows, word in (
        (768, 2304, 1, "rotary"), (768, 2304, 64, "rotary"), (768, 3072, 64, "gelu"), (768, 2048, 64, "swiglu"),
        (768, 50304, 64, None), (3072, 768, 64, None), (3072, 768, 1, None),
    ):  # fmt: skip
        weights = 2 * outputs if word == "swiglu" else outputs
        activation = None if word == "rotary" else word
        rotary = positions = None
        if word == "rotary":
            rotary = (*torch.empty(2, 1024, 1, 64, device="meta"), 24)
            positions = torch.empty(rows, dtype=torch.int32, device="meta")
        x, weight = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (rows, weights))
        eps = 1e-6 if width == 768 else None
        launches = launches_of(launch_skinny_linear, x, weight, eps, activation, None, rotary, positions, None)
        launches = [launch._replace(constants=launch.constants | {"EARLY": arch >= 90}) for launch in launches]
        yield (f"{outputs} outputs", f"{rows} rows", *([word] if word else [])), launches


def draw_calls() -> Iterator[tuple[tuple[str, ...], list[Launch]]]:
    """A step's tokens: dtype, top_k, top_p."""
    for dtype, top_k, top_p in (("bf16", 200, None), ("fp32", 896, 0.9), ("bf16", None, None), ("fp16", 5000, 0.9)):
        logits, uniform, out = (
            torch.empty(shape, dtype=kind, device="meta")
            for shape, kind in (((64, 50304), DTYPES[dtype]), ((64,), torch.float64), ((64,), torch.int64))
        )
        words = dtype, f"top_k {top_k}", *(["top_p"] if top_p else [])
        yield words, launches_of(launch_draw_tokens, logits, uniform, 0.8, top_k, top_p, out)
        yield (dtype, "greedy"), launches_of(launch_draw_tokens, logits, None, 0.0, None, None, out)


def hopper_calls() -> Iterator[tuple[tuple[str, ...], list[Launch]]]:
    """The forward at five lengths, in float16 for one mask; the backward at one length."""
    options = ((), ("softcap",), ("varlen",), ("softcap", "varlen"))
    calls = [*product((64, 128, 256), ("bf16",), ("causal", "full", "window"), options)]
    calls += [(head_dim, "fp16", "causal", ()) for head_dim in (64, 128, 256)]
    calls += [(head_dim, "bf16", "full", words) for head_dim in (64, 128) for words in (*BLOCK_MASKS, *ALIBI)]
    for (head_dim, dtype, mask, words), tokens in product(calls, (1024, 2048, 4096, 8192, 16384)):
        yield (dtype, mask, *words), launches_of(launch_hopper_fwd, *call(head_dim, dtype, mask, words, tokens))
    calls = [*product((64, 128), ("bf16", "fp16"), ("causal", "full"), ((),))]
    calls += product((64, 128), ("bf16",), ("causal", "full", "window"), options)
    calls += product((64, 128), ("bf16",), ("full",), BLOCK_MASKS + ALIBI)
    calls += product((64, 128), ("bf16",), ("causal",), ALIBI)
    for head_dim, dtype, mask, words in calls:
        yield (dtype, mask, *words), launches_of(_launch_hopper_bwd, *call(head_dim, dtype, mask, words))


def _launch_hopper_bwd(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    launch_hopper_bwd(q, None, q, k, v, q, q.new_empty(q.shape[:3], dtype=torch.float32), options)


def launches_of(launch: Callable[..., object], *arguments: object) -> list[Launch]:
    with recorded() as launches:
        launch(*arguments)
    return launches


def call(
    head_dim: int, dtype: str, mask: str, words: tuple[str, ...] = (), tokens: int = 0
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """q, k, v (1, H, N, D) without memory, stored as (1, N, H, D), and the options."""
    tokens = tokens or (1024 if "even" in words else 1000)
    made = {"dtype": DTYPES[dtype], "device": "meta"}
    heads, head_dim_v = 2 if "grouped" in words else 4, head_dim + 16 if "wider" in words else head_dim
    shapes = ((1, tokens, 4, head_dim), (1, tokens, heads, head_dim), (1, tokens, heads, head_dim_v))
    given = {
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": torch.empty(1, 4, device="meta")},
        "sinks": {"sinks": torch.empty(4, device="meta")},
        "dropout": {"dropout_p": 0.1, "dropout_seed": torch.empty((), dtype=torch.int64, device="meta")},
        "varlen": {f"cu_seqlens_{x}": torch.empty(3, dtype=torch.int32, device="meta") for x in "qk"},
        "block_mask": {f"mask_{x}": torch.empty(1, 1, 1, 4, dtype=torch.int32, device="meta") for x in MASK_TENSORS},
    }
    options = Options(mask == "causal", 1.0, 1 if mask == "window" else -1)
    for word in given.keys() & set(words):
        options = options._replace(**given[word])
    return *(torch.empty(shape, **made).transpose(1, 2) for shape in shapes), options


def compiled(launch: Launch, arch: int) -> CompiledKernel:
    """The launch's kernel for compute capability arch / 10, specialised as Triton does it for these arguments.

    Written for and checked with triton 3.6: `_pack_args` is a private name of it.
    """
    target = GPUTarget("cuda", arch, 32)
    kernel, backend, named = launch.kernel, make_backend(target), launch.constants | launch.how
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options, *described = kernel._pack_args(backend, named, *bind(*launch.arguments, **named))
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *described)
    return compile(source, target=target, options=vars(options))
