"""Packed documents: isolation, odd packings, one compilation, and the tiles' lookup."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from kernels import (
    api,
    flash_attention,
    flash_attention_varlen,
    launch,
    naive_attention,
    naive_attention_varlen,
    padded_documents,
    tiled_attention,
)
from kernels.call import Options, check_call
from kernels.launch import start
from kernels.portable.backward import launch_flash_bwd
from kernels.portable.forward import launch_flash_fwd
from kernels.portable.prepare import documents_launches
from kernels.portable.tiles import longest_first
from kernels.portable.tuning import Tile
from tests.attention_checks import compare_with_oracle, make_packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _poison(poisoned_memory):
    """Every test runs on memory that begins as NaN."""


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [
        ([40], [40]),
        ([0, 0, 33], [0, 0, 33]),
        ([33, 0, 0], [33, 0, 0]),
        ([16, 32, 16], [32, 32, 64]),  # whole tiles
        ([1] * 5, [1] * 5),
        ([0, 4], [6, 0]),  # queries without keys and keys without queries: nothing to do anywhere
    ],
)
def test_agrees_with_a_loop_over_documents(lengths_q, lengths_k):
    (q, k, v), arguments = make_packed(lengths_q, lengths_k, 2, 1, 16, device=DEVICE)
    compare_with_oracle(flash_attention_varlen, q, k, v, causal=True, **arguments)


@pytest.mark.parametrize("tma", [False, True])
def test_a_document_never_reads_another(tma):
    """Neighbours hold NaN: one stray product would show. Both by pointers and by descriptors."""
    lengths = [21, 33, 18]
    (q, k, v), arguments = make_packed(lengths, lengths, 1, 1, 16, device=DEVICE, dtype=torch.float16)
    q, k, v = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    options = Options(True, 0.25, **arguments)
    tile = Tile(16, 32, 4, 1, tma)
    do = torch.randn_like(q)

    def run(q, k, v, do):
        o, lse = launch_flash_fwd(q, k, v, options, tile)
        return o, *launch_flash_bwd(do, None, q, k, v, o, lse, options, tile, tile)[:3]

    clean = run(q, k, v, do)
    middle = slice(21, 54)
    poisoned = [x.clone() for x in (q, k, v, do)]
    for x in poisoned:
        x[:, :, :21] = float("nan")
        x[:, :, 54:] = float("nan")
    for actual, expected in zip(run(*poisoned), clean, strict=True):
        assert torch.equal(actual[:, :, middle], expected[:, :, middle])


def test_more_documents_than_are_counted_at_a_time():
    lengths = [0] * 126 + [3, 0, 0, 5, 1]
    (q, k, v), arguments = make_packed(lengths, lengths, 1, 1, 16, device=DEVICE)
    o = flash_attention_varlen(q.detach(), k.detach(), v.detach(), **arguments)
    torch.testing.assert_close(o, naive_attention_varlen(q, k, v, **arguments))


def test_cu_seqlens_of_any_stride():
    (q, k, v), arguments = make_packed([9, 4], [9, 4], 1, 1, 16, device=DEVICE)
    expected = flash_attention_varlen(q, k, v, **arguments)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arguments[name] = torch.stack([arguments[name], arguments[name] * 0 - 1], 1)[:, 0]
    assert torch.equal(flash_attention_varlen(q, k, v, **arguments), expected)


def test_autocast_casts_as_pytorch_does():
    (q, k, v), arguments = make_packed([9, 4], [9, 4], 1, 1, 16, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        o = flash_attention_varlen(q, k, v, **arguments, sinks=torch.zeros(1, device=DEVICE))
    assert o.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(o.float().sum(), q)
    assert grad.dtype == torch.float32


def test_a_kind_of_call_is_checked_once_and_its_tensors_are_each_calls_own(monkeypatch):
    checked = []
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(api, "check_call", lambda *args, **how: checked.append(how) or check_call(*args, **how))
    for seed, lengths in enumerate(([9, 4], [3, 10], [6, 7])):
        (q, k, v), arguments = make_packed(lengths, lengths, 2, 1, 16, device=DEVICE, seed=seed)
        arguments |= {"max_seqlen_q": 10, "max_seqlen_k": 10}
        slopes = torch.rand(2, 2, device=DEVICE)
        sinks = torch.randn(2, device=DEVICE, requires_grad=True)
        compare_with_oracle(flash_attention_varlen, q, k, v, alibi_slopes=slopes, sinks=sinks, **arguments)
    assert len(checked) == 1
    with pytest.raises(ValueError, match="alibi_slopes asks for a gradient"):
        flash_attention_varlen(q, k, v, alibi_slopes=slopes.requires_grad_(), **arguments)
    # what the checks change is changed at each call: a row for each document, the dtype
    checked.clear()
    for _ in range(2):
        slopes, sinks = torch.rand(2, device=DEVICE), torch.randn(2, device=DEVICE, dtype=torch.float64)
        given = {"alibi_slopes": slopes, "sinks": sinks, **arguments}
        expected = naive_attention_varlen(q, k, v, **given)
        torch.testing.assert_close(flash_attention_varlen(q, k, v, **given), expected)
    assert len(checked) == 2


def test_equals_the_dense_call_where_documents_are_equal():
    (q, k, v), arguments = make_packed([32, 32], [32, 32], 2, 2, 16, device=DEVICE)
    dense = (x.detach().reshape(2, 32, 2, 16).transpose(1, 2) for x in (q, k, v))
    expected, expected_lse = flash_attention(*dense, causal=True, return_lse=True)
    actual, lse = flash_attention_varlen(q, k, v, **arguments, causal=True, return_lse=True)
    assert torch.equal(actual.reshape(2, 32, 2, 16).transpose(1, 2), expected)
    assert torch.equal(lse.reshape(2, 2, 32).transpose(0, 1), expected_lse)


def test_outputs_are_stored_as_the_inputs_are():
    (q, k, v), arguments = make_packed([9, 4], [9, 4], 2, 2, 16, device=DEVICE)
    o, lse = flash_attention_varlen(q, k, v, **arguments, return_lse=True)
    assert o.shape == q.shape
    assert o.is_contiguous()
    assert lse.shape == (2, 13)
    for grad in torch.autograd.grad(o.square().sum(), (q, k, v)):
        assert grad.is_contiguous()


def test_runs_in_inference_mode():
    (q, k, v), arguments = make_packed([9, 4], [9, 4], 1, 1, 16, device=DEVICE)
    expected = flash_attention_varlen(q, k, v, **arguments)
    with torch.inference_mode():
        made_inside = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        for given in (arguments, made_inside, made_inside):
            assert torch.equal(flash_attention_varlen(q, k, v, **given), expected)


def test_the_operators_layout_needs_no_other_function():
    (q, k, v), arguments = make_packed([9, 4, 0], [9, 4, 0], 2, 1, 16, device=DEVICE)
    expected, expected_lse = flash_attention_varlen(q, k, v, **arguments, causal=True, return_lse=True)
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
    starts = arguments["cu_seqlens_q"]
    for cu_seqlens, max_seqlen in ((starts, None), (starts, 9), ((starts, starts.clone()), (9, 13))):
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        for attention in (flash_attention, naive_attention, tiled_attention):
            o, lse = attention(*dense, **packing, causal=True, return_lse=True)
            torch.testing.assert_close(o[0].transpose(0, 1), expected)
            torch.testing.assert_close(lse[0], expected_lse)
    with pytest.raises(ValueError, match="q has batch size 2; documents lie end to end in a batch of 1"):
        flash_attention(*(x.expand(2, -1, -1, -1) for x in dense), cu_seqlens=starts)


@pytest.mark.parametrize("pitch", [(4, 6), (9, 5)])
def test_padded_rows_are_documents_that_see_nothing_else(pitch):
    """Each query of a row's range sees the keys of that row's range; all other queries see none."""
    firsts_and_ends = torch.tensor([[2, 0, 1, 3], [5, 3, 1, 4], [1, 0, 2, 0], [4, 2, 4, 3]], dtype=torch.int32)
    sizes = 3 * pitch[0] + 4, 3 * pitch[1] + 5  # nothing follows the last row's tokens
    found = padded_documents(firsts_and_ends, *sizes, *pitch)
    for starts, size in zip(found, sizes, strict=True):
        assert (starts[0], starts[-1]) == (0, size)
        assert (starts.diff() >= 0).all()
    seen = {
        (q, k)
        for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(x.tolist()) for x in found), strict=True)
        for q, k in itertools.product(range(q0, q1), range(k0, k1))
    }
    expected = set()
    for row, (first_k, end_k, first_q, end_q) in enumerate(firsts_and_ends.T.tolist()):
        queries, keys = range(first_q, end_q), range(first_k, end_k)
        expected |= {(row * pitch[0] + q, row * pitch[1] + k) for q, k in itertools.product(queries, keys)}
    assert seen == expected
    torch.library.opcheck(padded_documents, (firsts_and_ends, *sizes, *pitch))


WRONG = {  # what is written behind the checks' back, of 40 tokens -> what the kernels take it for
    "beyond the tensor": ([0, 10, 2**30, 2**31 - 1], [0, 10, 40, 40]),
    "before the tensor": ([-(2**31), -5, 12, 40], [0, 0, 12, 40]),
    "falling": ([0, 30, 20, 40], [0, 30, 30, 40]),
    "begins late": ([25, 30, 35, 40], [0, 30, 35, 40]),
    "ends early": ([0, 3, 5, 7], [0, 3, 5, 40]),
}


@pytest.mark.parametrize("documents", [3, 1023, 1024, 3000])
def test_the_nearest_right_packing_of_any_numbers(documents):
    """However many are looked at together."""
    numbers = random.Random(documents)
    written = [numbers.randrange(-1000, 2 * 10**6) if numbers.random() < 0.1 else 300 * i for i in range(documents + 1)]
    tokens = 300 * documents
    meant, highest = [0], 0
    for x in written[1:]:
        highest = min(max(x, highest), tokens)
        meant.append(highest)
    meant[-1] = tokens
    given = torch.tensor(written, dtype=torch.int32, device=DEVICE)
    tensors = {"cu_seqlens_q": given, "cu_seqlens_k": given.clone()}
    tensors |= {"starts_q": torch.full_like(given, -7), "starts_k": torch.full_like(given, -7)}
    q = torch.empty(1, 1, tokens, 1, device="meta")
    (launch,) = documents_launches(q, q[:, :, :-1], tensors)
    start(launch)
    assert tensors["starts_q"].tolist() == meant
    assert tensors["starts_k"].tolist() == [min(x, tokens - 1) for x in meant]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_packing_is_taken_for_the_nearest_right_one(wrong):
    """Whatever cu_seqlens hold when the kernels run, these address no memory but their own."""
    written, meant = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in WRONG[wrong])
    (q, k, v), _ = make_packed([40], [40], 1, 1, 16, device=DEVICE)
    q, k, v = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    do = torch.randn_like(q)

    def run(starts):
        options = Options(True, 0.25, cu_seqlens_q=starts, cu_seqlens_k=starts)
        o, lse = launch_flash_fwd(q, k, v, options)
        return o, lse, *launch_flash_bwd(do, None, q, k, v, o, lse, options)[:3]

    for actual, expected in zip(run(written), run(meant), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("wrong", WRONG)
def test_gpu_a_packing_changed_after_it_was_checked_crashes_nothing(wrong, head_dim):
    written, meant = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in WRONG[wrong])
    (q, k, v), _ = make_packed([40], [40], 2, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    starts = meant.clone()

    def run():
        o = flash_attention_varlen(q, k, v, starts, starts, 40, 40, causal=True)
        return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))

    expected = run()
    starts.data.copy_(written)
    for actual, right in zip(run(), expected, strict=True):
        assert torch.equal(actual, right)


def packings(count: int, total: int, documents: int, seed: int):
    """cu_seqlens of `count` different packings of `total` tokens, some documents empty."""
    numbers = random.Random(seed)
    seen = set()
    while len(seen) < count:
        seen.add((0, *sorted(numbers.randrange(total + 1) for _ in range(documents - 1)), total))
    return [torch.tensor(starts, dtype=torch.int32, device=DEVICE) for starts in sorted(seen)]


def compile_once(count: int, total: int, documents: int) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def loss(q, k, v, cu_seqlens):
        o = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, total, total, causal=True)
        return o.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    (q, k, v), _ = make_packed([total], [total], 1, 1, 16, device=DEVICE)
    for i, cu_seqlens in enumerate(packings(count, total, documents, seed=0)):
        value = compiled(q, k, v, cu_seqlens)
        if i % (count // 4) == 0:
            assert torch.equal(value, loss(q, k, v, cu_seqlens))
            for grad, expected in zip(
                torch.autograd.grad(value, (q, k, v)),
                torch.autograd.grad(loss(q, k, v, cu_seqlens), (q, k, v)),
                strict=True,
            ):
                assert torch.equal(grad, expected)
    assert len(graphs) == 1


def test_one_compilation_serves_twenty_packings():
    compile_once(20, total=20, documents=3)


@pytest.mark.gpu
def test_gpu_one_compilation_serves_two_hundred_packings():
    compile_once(200, total=2000, documents=17)


@pytest.mark.parametrize("block", [1, 7, 16])
def test_the_tiles_of_a_packing_cover_it_once(block):
    """The rule of `document_of`, in Python: every row has one tile, and no tile two documents."""
    for lengths in itertools.product([0, 1, 6, 7, 8, 33], repeat=3):
        starts = [0, *itertools.accumulate(lengths)]
        covered = []
        for tile in range(starts[-1] // block + 3):
            document = max(d for d in range(3) if starts[d] // block + d <= tile)
            first = (tile - (starts[document] // block + document)) * block
            covered += [starts[document] + i for i in range(first, min(first + block, lengths[document]))]
        assert covered == list(range(starts[-1]))


@triton.jit(do_not_specialize=["num_docs"])
def _orders(documents_ptr, levels_ptr, cu_seqlens, num_docs, BLOCK: tl.constexpr):
    ordinal = tl.program_id(0)
    document, level = longest_first(ordinal, cu_seqlens, num_docs, BLOCK)
    tl.store(documents_ptr + ordinal, document)
    tl.store(levels_ptr + ordinal, level)


@pytest.mark.parametrize("lengths", [[5, 0, 64, 17, 16], [0], [1] * 5, [40] + [3] * 130 + [0, 33]])
def test_tiles_of_long_documents_come_first(lengths):
    """Every tile once, levels falling within 128 documents, and nothing after the last."""
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    launched = sum(lengths) // 16 + len(lengths)
    documents, levels = torch.full((2, launched), -7, dtype=torch.int32, device=DEVICE)
    _orders[(launched,)](documents, levels, cu_seqlens, len(lengths), BLOCK=16)
    order = [(d, level) for d, level in zip(documents.tolist(), levels.tolist(), strict=True) if d >= 0]
    assert sorted(order) == [(d, level) for d, n in enumerate(lengths) for level in range(-(-n // 16))]
    assert documents.tolist()[len(order) :] == [-1] * (launched - len(order))
    for chunk in (0, 1):
        falling = [level for d, level in order if d // 128 == chunk]
        assert falling == sorted(falling, reverse=True)
