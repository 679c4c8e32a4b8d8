"""Which token sees which: a probe of masks and positions, on a small model with the run's own kind of attention.

Four parts, each a way in which a GPT is called: `model` (a plain forward), `packing` (documents end to end), `KV cache`
and `paged KV cache` (a prompt in pieces, then token by token). In each
  - one token is changed: its own logits and those of later tokens in its document, within reach of its window, must
    change, and no others;
  - the attention matrix is read by passing one-hot values as V, and must be positive exactly where the mask is true;
  - every document must have the logits that a plain forward of it alone gives.
Rotary positions are relative, so a document whose positions continue from the previous one still has the right logits,
until the table ends. The last check therefore uses tables in which absolute positions matter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from data import document_starts
from kernels import why_not
from model import GPT, GPTConfig, KVCache, PagedKVCache, attend_with, resolve_model
from model.masks import parse_mask
from training.hardware import Hardware
from training.step import packed_rows

SEQ_LEN = 24
VOCAB = 32
END_OF_TEXT = 0
STARTS = ((0, 7, 8, 20), (0, 13))  # of documents in two rows; one has a single token
CHANGED = (0, 1, 7, 8, 13, 22, 23)  # tokens of a row that are changed one at a time: ends and both sides of a border
PIECES = (5, 3, 1, 1, 13, 1)  # how the cache is filled
# largest difference allowed between logits of the same tokens: another order of summation gives far less, wrong
# positions far more
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.1}

Run = Callable[[Tensor], Tensor]


def probe(config: GPTConfig, hardware: Hardware) -> dict[str, str | None]:
    """Return the first fault of each part as a sentence, or None.

    config: the run's, with attention resolved. Where that attention does not support documents, packing is probed with
    the one that `auto` would choose for them, and the part's name includes it.
    """
    parts = {"model": (_plain, config)}
    if config.mask is None:  # a mask supports neither documents nor a cache
        packing, features = config, config.attention_features(document_mask=True)
        if why_not(config.attention, hardware.dtype, features):
            automatic = replace(config, attention="auto")
            packing, *_ = resolve_model(automatic, hardware.device, hardware.dtype, document_mask=True)
        parts["packing" if packing is config else f"packing ({packing.attention})"] = _packing, packing
        parts |= {"KV cache": (_cache, config), "paged KV cache": (_pages, config)}
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("highest")  # TF32 would need a tolerance of its own
    torch.set_num_threads(1)  # the calls are tiny: on a busy machine two threads wait for each other
    try:
        with torch.no_grad(), hardware.autocast():
            return {name: next(part(_small_model(of, hardware), hardware), None) for name, (part, of) in parts.items()}
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def _small_model(config: GPTConfig, hardware: Hardware) -> GPT:
    """Two layers and a few heads, with the head_dim, grouping, window and switches of the run."""
    grouped = config.kv_heads != config.num_heads
    heads = 4 if grouped else 2
    sizes = {"num_layers": 2, "num_heads": heads, "num_kv_heads": 2, "n_embd": heads * config.head_dim}
    window = None if config.window is None else min(config.window, 5)  # short enough to end within SEQ_LEN
    mask = config.mask
    if mask is not None:
        pattern, number = parse_mask(mask)
        mask = f"{pattern}:{min(number, 5)}"
    small = replace(
        config, **sizes, mlp_hidden=64, window=window, mask=mask, loss="plain", activation_checkpointing="none",
        qk_gain=1.0,  # a large one leaves a token one neighbour: rounding would hide the others, not the mask
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = GPT(small, VOCAB, SEQ_LEN, device=hardware.device, generator=generator)
    for weight in model.parameters():
        weight.data *= 5  # with fresh weights attention is almost uniform: every token would see a mean
    return model.eval()


def _plain(model: GPT, hardware: Hardware) -> Iterator[str]:
    """A plain forward of one row."""
    return _faults(model, hardware, lambda tokens: model(tokens)[0], _tokens(1, hardware.device))


def _packing(model: GPT, hardware: Hardware) -> Iterator[str]:
    """Two rows of packed documents, as the training step passes them to the model."""
    tokens = _tokens(len(STARTS), hardware.device)
    for row, starts in enumerate(STARTS):
        tokens[row, list(starts[1:])] = END_OF_TEXT
    starts = document_starts(tokens.cpu(), END_OF_TEXT)
    documents = packed_rows(starts, 0, *tokens.shape, hardware.device)
    return _faults(model, hardware, lambda tokens: model(tokens, **documents).flatten(0, 1), tokens, starts.tolist())


def _cache(model: GPT, hardware: Hardware) -> Iterator[str]:
    """A prompt in pieces, then single tokens."""
    return _cached(model, hardware, lambda: model.make_cache(1), row=0)


def _pages(model: GPT, hardware: Hardware) -> Iterator[str]:
    """The same with a paged cache whose pages are not in the order of their numbers."""

    def cache() -> PagedKVCache:
        pages = model.make_cache(2, page=16)
        pages.allocate(0)
        pages.extend([0], 1)  # row 0 holds the first page until row 1 holds the second
        return pages

    return _cached(model, hardware, cache, row=1)


def _cached(model: GPT, hardware: Hardware, make: Callable[[], KVCache], row: int) -> Iterator[str]:
    def run(tokens: Tensor) -> Tensor:
        cache, logits = make(), []
        cache.allocate(row)
        for piece in tokens.split(list(PIECES), dim=1):
            cache.extend([row], piece.size(1))
            if row and cache.reserved[0] >= 0:
                cache.free(0)
            logits.append(model(piece.expand(row + 1, -1), kv_cache=cache)[row])
        return torch.cat(logits)

    return _faults(model, hardware, run, _tokens(1, hardware.device), pieces=PIECES)


# --- the checks


def _faults(
    model: GPT, hardware: Hardware, run: Run, tokens: Tensor, starts: Sequence[int] = (0,), pieces: Sequence[int] = ()
) -> Iterator[str]:
    """Yield what is wrong with `run`, which maps tokens (rows, SEQ_LEN) to the logits (N, V) of all rows.

    starts: the first token of each document. pieces: the number of tokens in each call of a layer; empty: one call.
    """
    number = torch.arange(tokens.numel())
    document_of = torch.bucketize(number, torch.tensor(starts), right=True)
    distance = number[:, None] - number
    sees = (distance >= 0) & (document_of[:, None] == document_of)
    moves = sees.clone()
    if model.config.mask is not None:
        sees = model.blocks[0].attention.pattern(len(number)).dense()[0, 0].cpu()
        moves = torch.linalg.matrix_power(sees.float(), len(model.blocks)) > 0
    elif (window := model.config.window) is not None:
        sees &= distance < window
        moves &= distance <= len(model.blocks) * (window - 1)
    ends = torch.tensor(pieces or (len(number),)).cumsum(0).tolist()
    expected = [sees[start:end, :end] for start, end in pairwise((0, *ends))]
    yield from _wrong_attention(model, lambda: run(tokens), expected)
    yield from _wrong_moves(run, tokens, moves)
    with _absolute_positions(model):
        documents = tokens.flatten().tensor_split(starts[1:])
        apart = run(tokens) - torch.cat([model(document[None])[0] for document in documents])
    for token in (~(apart.abs().amax(dim=1) <= TOLERANCE[hardware.dtype])).nonzero().flatten().tolist():
        start, by = starts[document_of[token] - 1], apart[token].abs().max()
        yield f"the document at token {start} has other logits than alone (token {token}, by {by:.2g})"


def _wrong_attention(model: GPT, call: Callable[[], Tensor], expected: list[Tensor]) -> Iterator[str]:
    """Read attention's matrix in every call of every layer; `expected` has one mask for each call of a layer."""
    read: list[list[Tensor]] = [[] for _ in model.blocks]

    def reader(layer: int, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
            columns = []
            for first in range(0, k.size(2), v.size(3)):  # as many keys at a time as V has channels
                which = torch.arange(first, first + v.size(3), device=v.device)
                one_hot = torch.arange(k.size(2), device=v.device)[:, None] == which
                columns.append(real(q, k, one_hot.to(v.dtype).expand_as(v).contiguous(), **options))
            read[layer].append(torch.cat(columns, dim=3)[0, ..., : k.size(2)] > 0)  # (Hq, Nq, Nk)
            return real(q, k, v, **options)

        return attend

    with attend_with(model, reader):
        call()
    for layer, matrices in enumerate(read):
        for found, sees in zip(matrices, expected, strict=True):
            before = sees.size(1) - sees.size(0)  # keys that were in the cache
            for _, query, key in (found.cpu() != sees).nonzero().tolist():
                verb = "does not see" if sees[query, key] else "sees"
                yield f"attention of layer {layer}: token {before + query} {verb} token {key}"


def _wrong_moves(run: Run, tokens: Tensor, moves: Tensor) -> Iterator[str]:
    """Change one token at a time and compare which logits change; moves[i, j]: those of token i change with token j."""
    usual = run(tokens)
    for place in (row * SEQ_LEN + place for row in range(len(tokens)) for place in CHANGED):
        changed = tokens.clone().flatten()
        changed[place] = changed[place] % (VOCAB - 1) + 1  # another token, and never end-of-text
        moved = (run(changed.view_as(tokens)) != usual).any(dim=1).cpu()
        for other in (moved != moves[:, place]).nonzero().flatten().tolist():
            verb = "does not move" if moves[other, place] else "moves"
            yield f"changing token {place} {verb} the logits of token {other}"


@contextmanager
def _absolute_positions(model: GPT) -> Iterator[None]:
    """Tables that scale q and k by a factor of each position, in place of a rotation: logits then show the position."""
    cos, sin = model.cos, model.sin
    # random, so that neighbours differ as much as any two positions: an offset of one shows
    scale = 0.5 + 2 * torch.rand(len(cos), generator=torch.Generator().manual_seed(2)).to(cos)
    model.cos, model.sin = scale[:, None, None].expand_as(cos).contiguous(), torch.zeros_like(sin)
    try:
        yield
    finally:
        model.cos, model.sin = cos, sin


def _tokens(rows: int, device: torch.device) -> Tensor:
    """(rows, SEQ_LEN) random tokens, none of them end-of-text."""
    return torch.randint(1, VOCAB, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(1)).to(device)
