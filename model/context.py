"""Context parallelism: the ranks of a process group share each sequence, and exchange what attention needs.

Three methods, over the attention that the model names; W is the number of ranks, n = N / W a rank's tokens:

    method  a rank's tokens        exchanged                    kept for the backward
    heads   piece r of W           q, k, v and O, all-to-all    q, k, v, O, LSE of N tokens, 1 / W of the heads
    gather  chunks r, 2W - 1 - r   K and V, all-gathered        q, O, LSE of n tokens, K and V of N
    ring    chunks r, 2W - 1 - r   K and V, passed on           q, k, v, O, LSE of n tokens

`heads` (DeepSpeed-Ulysses, arXiv:2309.14509) moves least and needs W to divide Hkv: a rank computes all tokens of some
heads, so nothing is merged. Its bits are one process's where a head's bits do not depend on how many heads a call has;
in Hopper's causal backward they do, as it sums dQ of the last heads in another order. In `gather` a rank's queries
attend to all keys up to their own in two ordinary calls, because the causal mask is aligned bottom-right. Pairing the
first with the last of 2W chunks, the second with the last but one and so on gives each rank equal work (zig-zag).
`gather` keeps the gathered K and V: with model.activation_checkpointing=full, which long sequences need anyway, they
live for one layer and are gathered again once; a backward that always gathers them would do it twice. `ring`
(arXiv:2310.01889) never holds K and V of more than two ranks, for any W, and the transfer of the next block overlaps
with the work on this one; but each block's O is rounded to q's dtype before the blocks are merged in float32, and it
supports no window, documents or dropout.

Every exchange is an all-to-all or an all-gather: sums over ranks are computed here, in float32 and in the order of
ranks, so that the same W gives the same bits whatever the communication library does. Gradients of weights are those of
this rank's tokens: the training step adds them over the group. `heads` and `gather` can be traced by torch.compile.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from model.attention import ALL, AttentionFunction, Documents, flash

# --- which tokens a rank has


def part_of(x: Tensor, rank: int, world_size: int, method: str, dim: int = 1) -> Tensor:
    """The rank's tokens of x, whose dimension `dim` holds all N, contiguous."""
    if method == "heads":
        return x.chunk(world_size, dim)[rank].contiguous()
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def _in_order(parts: Tensor) -> Tensor:
    """(W, B, n, ...) zig-zag parts of all ranks -> (B, N, ...)."""
    first, last = parts.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((*first, *reversed(last.unbind())), dim=1)


def _in_parts(x: Tensor, world_size: int) -> Tensor:
    """The inverse of `_in_order`."""
    chunks = x.chunk(2 * world_size, dim=1)
    paired = [chunk for rank in range(world_size) for chunk in (chunks[rank], chunks[-1 - rank])]
    return torch.cat(paired, dim=1).unflatten(1, (world_size, -1)).movedim(1, 0)


# --- exchanges; the functional collectives are those that torch.compile can trace


def _all_to_all(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send piece w of each tensor (W, ...) to rank w; returns what each rank sent here, in the order of ranks.

    One tensor is packed while the one before it is in transit.
    """
    travelling = [collectives.all_to_all_single(_packed(x), None, None, group) for x in tensors]
    return tuple(collectives.wait_tensor(x) for x in travelling)


def _packed(x: Tensor) -> Tensor:
    """`x.contiguous()`, copied eight bytes at a time where possible.

    PyTorch copies elements of 16 bits in 0.127 ms, and this way in 0.058 (100 MB, one H200, torch 2.11.0).
    """
    ratio = 8 // x.itemsize
    if torch.compiler.is_compiling() or x.is_contiguous() or x.stride(-1) != 1:
        return x.contiguous()
    if any(n % ratio for n in (x.size(-1), x.storage_offset(), *x.stride()[:-1])):
        return x.contiguous()
    return x.view(torch.int64).contiguous().view(x.dtype)


def _all_tokens(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, H, n, D) of each rank -> (B, H / W, N, D): all tokens of this rank's heads."""
    world_size = dist.get_world_size(group)
    # tokens before heads: with B = 1 what arrives needs no copy
    pieces = [x.unflatten(1, (world_size, -1)).permute(1, 0, 3, 2, 4) for x in tensors]  # (W, B, n, H / W, D)
    return tuple(x.movedim(0, 1).flatten(1, 2).transpose(1, 2) for x in _all_to_all(group, *pieces))


def _all_heads(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `_all_tokens`; stored as (B, n, H, D)."""
    world_size = dist.get_world_size(group)
    pieces = [x.transpose(1, 2).unflatten(1, (world_size, -1)).movedim(1, 0) for x in tensors]  # (W, B, n, H / W, D)
    return tuple(_packed(x.permute(1, 2, 0, 3, 4)).flatten(2, 3).transpose(1, 2) for x in _all_to_all(group, *pieces))


class _Exchange(torch.autograd.Function):
    """`_all_tokens` or `_all_heads`, differentiable: backward is the other one."""

    @staticmethod
    def forward(ctx, there, back, group, *tensors):
        ctx.back, ctx.group = back, group
        return there(group, *tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, None, *ctx.back(ctx.group, *gradients)


class _Keys(torch.autograd.Function):
    """kv (B, n, 2 Hkv, D) of each rank -> those of the first `end` tokens, (B, end, 2 Hkv, D), for each of `ends`.

    Backward adds up the gradients in float32, within the rank and then over the ranks, with one rounding per rank in
    between and one at the end.
    """

    @staticmethod
    def forward(ctx, kv, group, ends):
        ctx.group = group
        world_size = dist.get_world_size(group)
        parts = collectives.wait_tensor(collectives.all_gather_tensor(kv.contiguous(), 0, group))
        ordered = _in_order(parts.unflatten(0, (world_size, -1)))
        ctx.tokens = ordered.size(1)
        return tuple(ordered[:, :end] for end in ends)

    @staticmethod
    def backward(ctx, *gradients):
        like = gradients[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        total = like.new_zeros(like.size(0), ctx.tokens, *like.shape[2:], dtype=wide)
        for gradient in gradients:
            total[:, : gradient.size(1)] += gradient
        parts = _in_parts(total.to(like.dtype), dist.get_world_size(ctx.group))
        (received,) = _all_to_all(ctx.group, parts)
        return received.sum(0, dtype=wide).to(like.dtype), None, None


def _pass_on(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x to the next rank; returns what the previous one sends, complete after `collectives.wait_tensor`."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sent, received = [0] * world_size, [0] * world_size
    sent[(rank + 1) % world_size] = received[(rank - 1) % world_size] = x.numel()
    return collectives.all_to_all_single(x.contiguous().view(-1), received, sent, group).view(x.shape)


# --- the three methods


def heads(
    attend: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    **given: Any,
) -> Tensor:
    """Attention of sequences cut into W pieces: each rank computes all tokens of 1 / W of the heads.

    Args:
        attend: the attention of one process.
        q, k, v: (B, Hq, n, D), (B, Hkv, n, D) twice, this rank's piece; W divides Hkv.
        given: causal, window, scale, dropout_p, documents, as `attend` accepts them. Each rank draws its own dropout
            seed: the ranks' random streams must differ. Documents are of the whole row of N tokens; B is 1.

    Returns (B, Hq, n, D). Raises ValueError where W does not divide Hkv.
    """
    world_size = dist.get_world_size(group)
    if k.size(1) % world_size:
        remedy = "parallel.context_method=gather"
        raise ValueError(f"parallel.context={world_size} does not divide {k.size(1)} KV heads; use {remedy}")
    q, k, v = _Exchange.apply(_all_tokens, _all_heads, group, q, k, v)
    o = attend(q, k, v, **given)  # (B, Hq / W, N, D)
    return _Exchange.apply(_all_heads, _all_tokens, group, o)[0]


def gather(
    attend: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    causal: bool = False,
    window: tuple[int, int] = ALL,
    documents: tuple[Documents, ...] | None = None,
    **given: Any,
) -> Tensor:
    """Attention of zig-zag parts: each rank gathers K and V, and attends with its two chunks of queries.

    Args and returns as `heads`, for any W; `documents` are those of each chunk, from `documents_of_chunks`. Raises
    ValueError for a window or documents without causal.
    """
    if not causal and (window != ALL or documents is not None):
        raise ValueError("parallel.context_method=gather needs causal=True with a window or documents")
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if causal:
        ends, queries = _chunk_ends(rank, world_size, q.size(2) * world_size), q.chunk(2, dim=2)
    else:
        ends, queries = (q.size(2) * world_size,), (q,)
    outputs = []
    for i, keys in enumerate(_Keys.apply(_tokens_first(k, v), group, ends)):
        seen = {"causal": causal, "window": window, "documents": documents and documents[i]}
        outputs.append(attend(queries[i], *_heads_first(keys), **seen, **given).transpose(1, 2))
    return torch.cat(outputs, dim=1).transpose(1, 2)


def documents_of_chunks(cu_seqlens: Tensor, tokens: int, rank: int, world_size: int) -> tuple[Documents, Documents]:
    """The documents of `gather` in a row of N = `tokens`: for each chunk of a rank, those of its queries and keys.

    cu_seqlens: (documents + 1,) int32 of the whole row. A document that goes past the chunk ends with it, for queries
    and keys alike, so that its last query still sees its last key. Documents before the chunk have keys and no queries.
    """
    size = tokens // (2 * world_size)
    return tuple(
        Documents(((cu_seqlens - (end - size)).clamp(0, size), cu_seqlens.clamp(max=end)), (size, end))
        for end in _chunk_ends(rank, world_size, tokens)
    )


def ring(
    attend: AttentionFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup,
    causal: bool = False,
    window: tuple[int, int] = ALL,
    scale: float | None = None,
    dropout_p: float = 0.0,
    documents: None = None,
) -> Tensor:
    """Attention of zig-zag parts: K and V travel around the ring, and each rank merges its blocks by their LSE.

    torch.compile must not trace it: each transfer would be waited for at once, and torch 2.11 gave wrong gradients.
    Args and returns as `heads`, for any W. `attend` must also accept `return_lse`. Raises ValueError for a window,
    documents, dropout or a scale that is not positive.
    """
    if window != ALL or documents is not None or dropout_p:
        remedy = "use parallel.context_method=heads or gather"
        raise ValueError(f"parallel.context_method=ring takes no window, documents or dropout; {remedy}")
    scale = q.size(3) ** -0.5 if scale is None else scale
    if scale <= 0:
        raise ValueError(f"scale is {scale}; with parallel.context_method=ring it must be positive")
    return _Ring.apply(q, _tokens_first(k, v), group, attend, causal, scale)


class _Ring(torch.autograd.Function):
    """Saves q, k, v, O and LSE of the rank. K and V travel in both passes, and dK, dV with them in the backward."""

    @staticmethod
    def forward(ctx, q, kv, group, attend, causal, scale):
        ctx.call = group, attend, causal, scale
        own, o, lse = kv, None, None
        for rows, cols, masked, is_last in _blocks(group, causal, q.size(2)):
            arriving = None if is_last else _pass_on(kv, group)
            block = attend(q[:, :, rows], *_heads_first(kv[:, cols]), causal=masked, scale=scale, return_lse=True)
            if o is None:  # the rank's own keys, which all its queries see
                o, lse = (x.to(block[1].dtype, copy=True) for x in block)  # selective checkpointing keeps x itself
            else:
                _merge(o[:, :, rows], lse[:, :, rows], *block)
            kv = None if is_last else collectives.wait_tensor(arriving)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        group, attend, causal, scale = ctx.call
        q, kv, o, lse = ctx.saved_tensors
        gradients = _flash_gradients if attend is flash else _gradients_by_autograd
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
        for rows, cols, masked, is_last in _blocks(group, causal, q.size(2)):
            arriving = None if is_last else _pass_on(kv, group)
            ours = (x[:, :, rows] for x in (do, q, o, lse))
            block = gradients(attend, *ours, *_heads_first(kv[:, cols]), causal=masked, scale=scale)
            dq[:, :, rows] += block[0]
            dkv = collectives.wait_tensor(dkv)  # it was in transit during the block
            dkv[:, cols] += _tokens_first(*block[1:])
            dkv = _pass_on(dkv, group)
            kv = None if is_last else collectives.wait_tensor(arriving)
        # after W steps dK, dV are back at their rank
        return dq.to(q.dtype), collectives.wait_tensor(dkv).to(q.dtype), None, None, None, None


def _blocks(group: dist.ProcessGroup, causal: bool, tokens: int) -> Iterator[tuple[slice, slice, bool, bool]]:
    """For each step of the ring: the rows of q, the columns of k, whether their mask is causal, whether it is the last.

    The causal mask shows another rank's chunks wholly or not at all: an earlier rank's first chunk to all queries, and
    a later rank's two chunks to the second chunk of queries.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everything = slice(0, tokens)
    for step in range(world_size):
        source = (rank - step) % world_size
        rows = slice(tokens // 2, tokens) if causal and source > rank else everything
        cols = slice(0, tokens // 2) if causal and source < rank else everything
        yield rows, cols, causal and source == rank, step + 1 == world_size


def _merge(o: Tensor, lse: Tensor, o_block: Tensor, lse_block: Tensor) -> None:
    """Merge a block into O and LSE, in place, weighted by its share of the softmax's denominator."""
    total = torch.logaddexp(lse, lse_block)
    o.lerp_(o_block.to(o.dtype), torch.exp(lse_block - total)[..., None])
    lse.copy_(total)


def _flash_gradients(_, do, q, o, lse, k, v, *, causal, scale) -> tuple[Tensor, ...]:
    """dQ, dK, dV of a block, by the kernels' backward, which is given O and LSE of whole rows."""
    backward = torch.ops.flashgpt.flash_bwd.default
    return backward(do, None, q, k, v, o, lse, causal, scale)[:3]


def _gradients_by_autograd(attend, do, q, o, lse, k, v, **options) -> tuple[Tensor, ...]:
    """dQ, dK, dV of a block, for any attention: O = sum of share * O_block, and share = exp(LSE_block - LSE)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o_block, lse_block = attend(*inputs, return_lse=True, **options)
    do_block = do * torch.exp(lse_block.detach() - lse)[..., None]
    dlse_block = (do_block * (o_block.detach() - o)).sum(-1)
    return torch.autograd.grad((o_block, lse_block), inputs, (do_block.to(do.dtype), dlse_block.to(lse.dtype)))


METHODS: dict[str, Callable[..., Tensor]] = {"heads": heads, "gather": gather, "ring": ring}


# --- helpers that the methods share


def _chunk_ends(rank: int, world_size: int, tokens: int) -> tuple[int, int]:
    """The ends of the rank's two chunks of the 2W."""
    size = tokens // (2 * world_size)
    return (rank + 1) * size, (2 * world_size - rank) * size


def _tokens_first(k: Tensor, v: Tensor) -> Tensor:
    """(B, Hkv, n, D) twice -> (B, n, 2 Hkv, D), contiguous."""
    return torch.cat((k.transpose(1, 2), v.transpose(1, 2)), dim=2)


def _heads_first(kv: Tensor) -> list[Tensor]:
    """The inverse of `_tokens_first`, by views."""
    return [x.transpose(1, 2) for x in kv.chunk(2, dim=2)]
