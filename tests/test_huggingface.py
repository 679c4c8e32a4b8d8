"""Our attention in transformers' models against their own eager one, and each document of a packing alone."""

import itertools
import runpy
import warnings
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")

from transformers import masking_utils  # noqa: E402

from kernels import tiled_attention  # noqa: E402
from kernels.decode import MAX_QUERIES  # noqa: E402
from model import huggingface  # noqa: E402
from tests.huggingface_models import (  # noqa: E402
    DECODERS,
    ENCODERS,
    GROUPED,
    LAYERS,
    VOCAB,
    N,
    build,
    close,
    padding,
    pytorch_on_a_cpu,
    tokens,
    with_each,
)

pytestmark = pytest.mark.usefixtures("one_thread")
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for a CPU")


@pytest.fixture
def in_pytorch(monkeypatch):
    pytorch_on_a_cpu(monkeypatch)


def on(device, model, dtype, name):
    model.set_attn_implementation(name)
    return model.to(device, dtype)


def step(model, batch):
    """(logits of real tokens, the gradients of all parameters)"""
    model.train()
    model.zero_grad()
    real = batch.get("decoder_attention_mask", batch.get("attention_mask")).bool()
    logits = model(**batch, use_cache=False).logits[real] if hasattr(model, "generate") else model(**batch).logits[real]
    torch.nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % VOCAB).backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check_step(family, side, rows=3, **changed):
    batch = {"input_ids": tokens(rows), "attention_mask": padding(side)[-rows:]}
    theirs, ours = with_each(build(family, **changed), step, batch=batch)
    close(theirs[0], ours[0])
    close(theirs[1], ours[1], 2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_padding_and_gradients(family, side, in_pytorch):
    check_step(family, side)


@INTERPRETED
@pytest.mark.parametrize("family", ["GptOss", "Bert"])  # grouped heads, windows, sinks; both ways
def test_padding_and_gradients_in_the_interpreter(family):
    check_step(family, "left", rows=2, num_hidden_layers=1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ENCODERS)
def test_padded_texts_as_short_as_a_step_of_generation(family, side, in_pytorch):
    """As many queries as a call over a cache takes, which sees no window both ways."""
    mask = padding(side, length=12)

    def run(model):
        with torch.no_grad():
            return model(tokens(length=12), attention_mask=mask).logits[mask.bool()]

    close(*with_each(build(family), run))


def bart_batch(mask):
    return {"input_ids": tokens(), "attention_mask": padding("right"), "decoder_attention_mask": mask,
            "decoder_input_ids": tokens(length=mask.shape[1], seed=2)}  # fmt: skip


@pytest.mark.parametrize("mask", [padding("right", length=18), torch.ones(3, N, dtype=torch.int64)])
def test_padding_and_gradients_across_encoder_and_decoder(mask, in_pytorch):
    """Texts of one length are other tokens, too: the one's padding is not the other's."""
    theirs, ours = with_each(build("Bart"), step, batch=bart_batch(mask))
    close(theirs[0], ours[0])
    close(theirs[1], ours[1], 2e-5)


# --- caches and generation


def in_chunks(model, cache, mask, chunks=((0, 17), (17, 18), (18, N))):
    """Logits of a prompt that is read in chunks."""
    ids, logits = tokens(), []
    with torch.no_grad():
        for begin, end in chunks:
            logits.append(model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits)
    return torch.cat(logits, 1)[mask.bool()]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_a_prompt_read_in_chunks(family, static, in_pytorch):
    def run(model):
        config = model.config
        cache = transformers.StaticCache(config, 40) if static else transformers.DynamicCache(config=config)
        return in_chunks(model, cache, padding("left"))

    close(*with_each(build(family), run))


@pytest.mark.parametrize("first", [9, MAX_QUERIES])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("static", [False, True])
def test_chunks_that_have_padding_alone_or_end_with_it(static, side, first, in_pytorch):
    """A row then has no key yet, or queries behind its last one, which count for where the others stand."""

    def run(model):
        config = model.config
        cache = transformers.StaticCache(config, 40) if static else transformers.DynamicCache(config=config)
        return in_chunks(model, cache, padding(side), ((0, first), (first, N)))

    close(*with_each(build("Llama"), run))


@pytest.mark.parametrize(
    ("family", "changed"),
    [("GPT2", {"scale_attn_by_inverse_layer_idx": True}), ("GptOss", {"layer_types": ["full_attention"] * 2})],
)
def test_layers_with_scales_or_sinks_of_their_own_share_no_call_over_a_cache(family, changed, in_pytorch):
    def run(model):
        return in_chunks(model, transformers.DynamicCache(config=model.config), padding("left"))

    close(*with_each(build(family, **changed), run))


def padded_call(queries, keys=None, values=None, **more):
    """(what our attention gives for the last queries of padded rows, the same from its definition)"""
    torch.manual_seed(0)
    q = torch.randn(3, 4, queries, 16)
    keys, values = (torch.randn(3, 2, N, 16) if x is None else x for x in (keys, values))
    real = padding("left").bool()
    mask = huggingface.mask(3, queries, N, N - queries, attention_mask=real)
    found = huggingface.attention(torch.nn.Identity(), q, keys, values, mask, **more)[0]
    rows = [
        tiled_attention(q[b, None], keys[b, None][:, :, real[b]], values[b, None][:, :, real[b]], causal=True)
        for b in range(3)
    ]
    # a query before all keys of its row sees nothing
    return found, torch.cat(rows).transpose(1, 2)


def test_few_queries_without_gradients_leave_those_of_keys_and_values(in_pytorch):
    """As where an adapter is on keys alone: a call over a cache, which has none, would leave them out in silence."""
    gradients = []
    for way in range(2):
        k, v = (torch.randn(3, 2, N, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (1, 2))
        padded_call(2, k, v)[way].square().sum().backward()
        gradients += [k.grad, v.grad]
    close(gradients[2], gradients[0])
    close(gradients[3], gradients[1])


def test_dropout_of_few_queries_arrives(in_pytorch):
    with torch.no_grad():
        plain, dropped = padded_call(2)[0], padded_call(2, dropout=0.5)[0]
    assert not torch.equal(plain, dropped)


LAYOUTS = {
    "rows that share keys": lambda x: x[:1].expand(3, -1, -1, -1),
    "values as a projection leaves them": (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "values of another memory": (lambda x: x, lambda x: torch.cat((x, x), 2)[:, :, :N]),
    "head_dim outermost": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a view of fewer heads": lambda x: torch.cat((x, x), 1)[:, :2],
}


@pytest.mark.parametrize("queries", [1, N - 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_and_values_lie_as_they_like(layout, queries, in_pytorch, monkeypatch):
    """What a call over a cache cannot read is not given to it."""
    naive = huggingface.flash_attention_with_kvcache

    def over_a_cache(q, k, v, **options):
        assert k.stride() == v.stride()
        assert k.stride(3) == 1
        return naive(q, k, v, **options)

    monkeypatch.setattr(huggingface, "KVCacheLayers", lambda **options: partial(over_a_cache, **options))
    of_k, of_v = LAYOUTS[layout] if isinstance(LAYOUTS[layout], tuple) else (LAYOUTS[layout],) * 2
    k, v = (torch.randn(3, 2, N, 16) for _ in range(2))
    with torch.no_grad():
        found, expected = padded_call(queries, of_k(k), of_v(v))
    seen = slice(max(0, queries - 7), None)  # in every row
    close(expected[:, seen], found[:, seen])


def test_a_static_cache_without_padding_is_read_as_far_as_it_is_written(in_pytorch):
    """Also where more tokens are read at once than a call over a cache takes."""
    for queries in (3, N):
        q, k = torch.randn(3, 4, queries, 16), torch.randn(3, 2, 40, 16)
        mask = huggingface.mask(3, queries, 40, 7)
        found = huggingface.attention(torch.nn.Identity(), q, k, k, mask)[0]
        written = k[:, :, : 7 + queries]
        close(tiled_attention(q, written, written, causal=True).transpose(1, 2), found)


def generated(model, mask, **options):
    ids = tokens()
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True,
        output_logits=options.get("num_beams", 1) == 1, **options,
    )  # fmt: skip


HOW = {"plain": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}}


@pytest.mark.parametrize(("family", "how"), [*itertools.product(DECODERS, HOW), ("Bart", "plain"), ("Bart", "beams")])
def test_generate(family, how, in_pytorch):
    mask = padding("right" if family == "Bart" else "left")
    theirs, ours = with_each(build(family), generated, mask=mask, **HOW[how])
    assert torch.equal(theirs.sequences, ours.sequences)
    assert len(set(theirs.sequences[:, -12:].flatten().tolist())) > 2  # no text of one word


def test_a_cache_is_read_as_it_lies_under_autocast(in_pytorch, monkeypatch):
    """RoPE's float32 keys are cast once: as documents in one row of tokens they were copied once for each head."""
    engine, found = huggingface._engine, []

    def watching(query):
        return lambda q, k, v, **options: found.append(k.dtype) or engine(query)(q, k, v, **options)

    monkeypatch.setattr(huggingface, "_engine", watching)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = with_each(build("Llama"), generated, mask=padding("left"))
    close(theirs.logits[0], ours.logits[0], 0.03)
    assert found == [torch.bfloat16] * 2, "the prompt in two layers: later tokens go over the cache"


@INTERPRETED
def test_generate_in_the_interpreter():
    def run(model):
        options = {"max_new_tokens": 2, "do_sample": False, "cache_implementation": "static"}
        return model.generate(tokens(2), attention_mask=padding("left")[1:], **options)

    theirs, ours = with_each(build("GptOss", num_hidden_layers=1), run)
    assert torch.equal(theirs, ours)


# --- packed documents


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("family", DECODERS)
def test_packed_documents_are_what_each_is_alone(family, told, in_pytorch):
    """Not against eager: GPT-OSS and OPT let documents see each other there."""
    model, ids = build(family), tokens(rows=2)
    model.set_attn_implementation(huggingface.NAME)
    lengths = (5, 9, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(2, -1)
    more = {}
    if told == "cu_seq_lens":
        starts = torch.tensor([0, 5, 14, 21, 26, 35, 42], dtype=torch.int32)
        more = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False, **more).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    close(torch.cat(alone, dim=1), packed)


def test_documents_of_keys_may_be_longer_than_those_of_queries(in_pytorch):
    starts = [torch.tensor(x, dtype=torch.int32) for x in ((0, 5, 12), (0, 9, 21))]
    q, k = torch.randn(1, 4, 12, 16), torch.randn(1, 4, 21, 16)
    given = {"cu_seq_lens_q": starts[0], "cu_seq_lens_k": starts[1]}
    packed = huggingface.attention(torch.nn.Identity(), q, k, k, None, **given)[0]
    for queries, keys in ((slice(5), slice(9)), (slice(5, 12), slice(9, 21))):
        part = k[:, :, keys]
        close(huggingface.attention(torch.nn.Identity(), q[:, :, queries], part, part, None)[0], packed[:, queries])


POSITIONS = {
    "one row of them for two": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
    "a document that begins further on": torch.tensor([[0, 1, 2, 3, 4, 9, 10, 11, 12]]).expand(2, -1),
}


@pytest.mark.parametrize("which", POSITIONS)
def test_documents_begin_where_positions_do_not_increase_by_one(which, in_pytorch):
    q = torch.randn(2, 4, 9, 16)
    found = huggingface.attention(torch.nn.Identity(), q, q, q, None, position_ids=POSITIONS[which])[0]
    for part in (slice(5), slice(5, 9)):
        x = q[:, :, part]
        close(tiled_attention(x, x, x, causal=True).transpose(1, 2), found[:, part])


def test_positions_that_say_nothing_of_documents_are_left_alone(in_pytorch):
    """Qwen2-VL's have three kinds, of time, height and width; an encoder's may stand anywhere."""
    q, again = torch.randn(9, 4, 9, 16), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(9, -1)
    for causal, positions in ((True, again.expand(3, 9, -1)), (False, again)):
        given = {"is_causal": causal, "position_ids": positions}
        found = huggingface.attention(torch.nn.Identity(), q, q, q, None, **given)[0]
        close(tiled_attention(q, q, q, causal=causal).transpose(1, 2), found)


def test_who_sees_whom_is_the_arguments_where_there_is_no_mask(in_pytorch):
    q, encoder = torch.randn(1, 4, N, 16), torch.nn.Identity()
    encoder.is_causal = False
    for module, given, causal in ((torch.nn.Identity(), False, False), (encoder, True, True), (encoder, None, False)):
        found = huggingface.attention(module, q, q, q, None, is_causal=given)[0]
        close(tiled_attention(q, q, q, causal=causal).transpose(1, 2), found)


# --- training as it is done


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, in_pytorch):
    model, batch = build("Llama"), {"input_ids": tokens(), "attention_mask": padding("left")}
    model.set_attn_implementation(huggingface.NAME)
    plain = step(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for ours, theirs in zip(step(model, batch), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_arrives(in_pytorch):
    model, batch = build("Llama", attention_dropout=0.3), {"input_ids": tokens(), "attention_mask": padding("left")}
    model.set_attn_implementation(huggingface.NAME)
    torch.manual_seed(0)
    first, second = step(model, batch)[0], step(model, batch)[0]
    torch.manual_seed(0)
    assert torch.equal(step(model, batch)[0], first)
    assert not torch.equal(first, second)
    model.eval()
    with torch.no_grad():
        one, two = (model(**batch).logits for _ in range(2))
    assert torch.equal(one, two)
    model.train()
    pairs = torch.ones(len(tokens()), 1, tokens().shape[1], tokens().shape[1], dtype=torch.bool).tril()
    one, two = (model(tokens(), attention_mask=pairs).logits for _ in range(2))
    assert not torch.equal(one, two)


@INTERPRETED
@pytest.mark.parametrize("length", [N, 10])  # documents, and few enough queries to be read as over a cache
def test_compiled(length):
    """In one graph, where no part of a mask must be looked into: causal or both ways, padded."""
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation(huggingface.NAME)
    batch = {"input_ids": tokens(2, length), "attention_mask": padding("left", 3, length)[1:], "use_cache": False}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(model(**batch).logits, compiled(**batch).logits)
    torch.compiler.reset()


def test_compiled_with_gradients_of_other_lengths_on_a_cpu(in_pytorch):
    """As a Trainer's batches are. Without an attention_mask the second is of any length."""
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation(huggingface.NAME)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for length in (21, 30, 25):
        batch = {"input_ids": tokens(length=length), "use_cache": False}
        found = []
        for call in (model, compiled):
            model.zero_grad()
            logits = call(**batch).logits
            logits.square().mean().backward()
            found.append((logits, [p.grad for p in model.parameters()]))
        for ours, theirs in zip(found[0][1], found[1][1], strict=True):
            close(ours, theirs)
        close(found[0][0], found[1][0])
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph, or pass an attention_mask"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch)
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_with_a_window(in_pytorch):
    model = build("Mistral", num_hidden_layers=1)
    model.set_attn_implementation(huggingface.NAME)
    batch = {"input_ids": tokens(), "attention_mask": padding("left"), "use_cache": False}
    torch.compiler.reset()
    with torch.no_grad():
        close(model(**batch).logits, torch.compile(model, backend="eager")(**batch).logits)
    torch.compiler.reset()


# --- no wait, no copy


class Copies(TorchDispatchMode):
    """The operators that make a tensor as large as k of the memory of k or v."""

    def __init__(self, k, v):
        super().__init__()
        self.size, self.memory, self.found = k.numel(), {x.untyped_storage()._cdata for x in (k, v)}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        read = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        is_large = isinstance(out, torch.Tensor) and not function.is_view and out.numel() >= self.size
        if is_large and read & self.memory:
            self.found.append(str(function))
        return out


@pytest.mark.parametrize("layout", ["projected", "cached"])
@pytest.mark.parametrize("queries", [1, N])
def test_keys_and_values_are_not_copied(layout, queries, monkeypatch):
    """As a projection leaves them, (B, N, H, D) in memory, and as a cache holds them, (B, H, N, D)."""
    seen = []

    def stub(q, k, v, **_):
        seen.append([k.data_ptr(), v.data_ptr()])
        return q

    monkeypatch.setattr(huggingface, "_engine", lambda *_: stub)
    monkeypatch.setattr(huggingface, "KVCacheLayers", lambda *_, **__: stub)
    shape = (3, N, 2, 16) if layout == "projected" else (3, 2, N, 16)
    k, v = (torch.randn(shape) for _ in range(2))
    if layout == "projected":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = torch.randn(3, queries, 4, 16).transpose(1, 2)
    mask = huggingface.mask(3, queries, N, N - queries, attention_mask=padding("left").bool())
    with torch.no_grad(), Copies(k, v) as copies:
        huggingface.attention(None, q, k, v, mask)
    assert copies.found == []
    assert seen == [[k.data_ptr(), v.data_ptr()]]


@pytest.mark.parametrize("seen", ["all", "padded", "packed", "pairs"])
def test_the_result_can_be_viewed(seen, in_pytorch):
    """AFMoE and JetMoE merge its heads by `view`, as transformers' own attentions leave it contiguous."""
    q = torch.randn(3, 4, N, 16)
    padded, more = padding("left").bool(), {}
    mask = huggingface.mask(3, N, N, attention_mask=padded if seen == "padded" else None)
    if seen == "packed":
        more["cu_seq_lens_q"] = torch.tensor([0, 30, 3 * N], dtype=torch.int32)
    if seen == "pairs":
        mask = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    assert huggingface.attention(torch.nn.Identity(), q, q, q, mask, **more)[0].is_contiguous()


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_a_step_copies_no_keys_and_values(family, monkeypatch):
    """In no layer of a padded training step, of reading a padded batch and of a token after it."""
    calls = []

    def counted(module, query, key, value, attention_mask, **more):
        assert attention_mask.dtype == torch.int32  # ranges of keys, not pairs
        with Copies(key, value) as copies:
            found = huggingface.attention(module, query, key, value, attention_mask, **more)
        calls.append((query.shape[2], torch.is_grad_enabled(), len(copies.found)))
        return found

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":

        def stub(q, k, v, **_):  # stored as the kernels store it, and of no other memory
            batch, heads, tokens, head_dim = q.shape
            return torch.zeros(batch, tokens, heads, head_dim, dtype=q.dtype).transpose(1, 2)

        monkeypatch.setattr(huggingface, "_engine", lambda *_: stub)
        monkeypatch.setattr(huggingface, "KVCacheLayers", lambda **_: stub)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, huggingface.NAME, counted)
    model = on(device, build(family), torch.bfloat16, huggingface.NAME)
    ids, mask = tokens().to(device), padding("left").to(device)
    model(ids, attention_mask=mask, **{"use_cache": False} if family in DECODERS else {})
    # these join the parts of turned heads by `cat`, so that k is (B, H, N, D) in memory; gradients need (B, N, H, D)
    expected = [(N, True, int(family in ("GptOss", "GPTNeoX", "Phi3")))] * 2
    if family in DECODERS:
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            model(ids[:, :1], attention_mask=torch.cat((mask, mask[:, -1:]), 1), past_key_values=cache)
        expected += [(N, False, 0)] * 2 + [(1, False, 0)] * 2
    assert calls == expected


@pytest.mark.parametrize("family", sorted({*DECODERS, *ENCODERS} - {"GptOss"}))  # whose experts look for a driver
def test_a_padded_step_never_waits_for_the_gpu(family, monkeypatch):
    """On fake tensors of a GPU, where whatever would wait raises: theirs too."""
    monkeypatch.setattr("kernels.support.capability", lambda _: (9, 0))
    monkeypatch.setattr("model.huggingface_masks._check_later", lambda *_: None)  # needs a GPU, and is tested there
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        model = build(family)
        model.set_attn_implementation(huggingface.NAME)
        ids = torch.zeros(3, N, dtype=torch.int64)
        mask = torch.ones(3, N, dtype=torch.int64)
        model.train(family != "OPT")  # whose 5.22 asks whether a layer is dropped, of a CPU's number
        more = {"use_cache": False} if hasattr(model, "generate") else {}
        assert model(ids, attention_mask=mask, **more).logits.requires_grad
        if family in DECODERS:
            model.eval()
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                model(ids, attention_mask=mask, past_key_values=cache)
                more = torch.ones(3, N + 1, dtype=torch.int64)
                model(ids[:, :1], attention_mask=more, past_key_values=cache)


# --- refusals: one line each, with the remedy


def refused(match, family="Llama", **given):
    model = build(family)
    model.set_attn_implementation(huggingface.NAME)
    with pytest.raises(ValueError, match=match) as error:
        model(tokens(), **given)
    assert "\n" not in str(error.value)


SDPA = r'use set_attn_implementation\("sdpa"\), or "eager" where the model has no sdpa'


def test_a_row_of_padding_alone_is_none(in_pytorch):
    model, mask = build("Llama"), padding("left")
    model.set_attn_implementation(huggingface.NAME)
    mask[1] = 0
    assert huggingface.mask(3, N, N, attention_mask=mask.bool()).dtype == torch.int32, "no hole, which needs pairs"
    with torch.no_grad():
        logits = model(tokens(), attention_mask=mask).logits
        close(model(tokens()[[0, 2]], attention_mask=mask[[0, 2]]).logits, logits[[0, 2]])
    assert logits.isfinite().all()


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_weights_are_refused(family, in_pytorch):
    refused("output_attentions", family, output_attentions=True)


@pytest.mark.parametrize(("given", "match"), [
    ({"position_bias": torch.zeros(1, 4, N, N)}, rf"the model hands position_bias to its attention, .*{SDPA}"),
    ({"indices": torch.zeros(1, N, 2)}, rf"the model hands indices to its attention, .*{SDPA}"),
    ({"block_indices": torch.zeros(1, N, 2)}, rf"the model hands block_indices to its attention, .*{SDPA}"),
    ({"sinks": torch.zeros(4)}, rf"the model hands sinks to its attention, .*{SDPA}"),
    ({"output_attentions": True}, "output_attentions asks for weights that gpt_triton never has"),
    ({"attention_mask": torch.ones(1, N, dtype=torch.bool)}, rf"reached a layer with shape \(1, 21\) .*{SDPA}"),
    ({"attention_mask": torch.ones(1, 1, N, N, dtype=torch.int32)}, rf"with shape \(1, 1, 21, 21\) .*{SDPA}"),
    ({"attention_mask": torch.ones(3, 1, 2, N, dtype=torch.int32)}, rf"with shape \(3, 1, 2, 21\) .*{SDPA}"),
    ({"attention_mask": torch.ones(4, N, dtype=torch.int32)}, rf"with shape \(4, 21\) .*{SDPA}"),
    ({"cache": object()}, rf"a paged cache \(continuous batching\) .*{SDPA}"),
])  # fmt: skip
def test_what_the_kernels_do_not_compute_is_refused(given, match):
    q = torch.zeros(1, 4, N, 16)
    with pytest.raises(ValueError, match=match):
        huggingface.attention(torch.nn.Identity(), q, q, q, **{"attention_mask": None} | given)


def test_no_other_attention_takes_the_place_of_kernels_that_cannot_run():
    """Only on a CPU is it their mathematics in PyTorch."""
    with pytest.raises(ValueError, match=rf"^device type meta is not supported by flash attention .*; {SDPA}$"):
        huggingface._engine(torch.empty(1, 4, N, 16, device="meta"))


def test_documents_beside_pairs_are_refused(in_pytorch):
    """The pairs would have to say it; without this, documents would see each other."""
    q, starts = torch.zeros(1, 4, N, 16), torch.tensor([0, 9, N], dtype=torch.int32)
    pairs = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="block_mask with varlen is not supported"):
        huggingface.attention(torch.nn.Identity(), q, q, q, pairs, cu_seq_lens_q=starts)


def test_a_window_is_the_masks_and_not_the_layers():
    """Qwen2-MoE's layers hand none to their attention, and T5Gemma's encoder one that is a token narrower than its."""
    sizes = {k: v for k, v in GROUPED.items() if k != "bos_token_id"} | {"num_key_value_heads": 4}
    one = sizes | LAYERS | {"dropout_rate": 0.0}
    t5gemma = {"encoder": one, "decoder": one | {"cross_attention_hidden_size": 64}, "is_encoder_decoder": False}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    of_all = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
    for model in (
        transformers.T5GemmaEncoderModel(transformers.T5GemmaConfig(**t5gemma)).eval(),
        transformers.Qwen2MoeModel(transformers.Qwen2MoeConfig(**sizes, **experts, **of_all)).eval(),
    ):
        found = {}
        for name in ("eager", huggingface.NAME):
            model.set_attn_implementation(name)
            with torch.no_grad():
                found[name] = model(tokens()).last_hidden_state
        torch.testing.assert_close(found[huggingface.NAME], found["eager"], atol=1e-5, rtol=0)


def test_a_mask_of_three_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"^attention_mask has 3 dimensions; gpt_triton takes \(B, tokens\) of 1s and"):
        huggingface.mask(2, N, N, attention_mask=torch.ones(2, N, N, dtype=torch.bool))


@pytest.mark.parametrize(
    "sees",
    [
        masking_utils.sliding_window_causal_mask_function(4),
        masking_utils.sliding_window_bidirectional_mask_function(4),
        masking_utils.sliding_window_overlay(4),  # no bound ahead
        masking_utils.sliding_window_causal_mask_function(0),  # nothing
        masking_utils.and_masks(
            masking_utils.sliding_window_causal_mask_function(7), masking_utils.sliding_window_bidirectional_overlay(3)
        ),
    ],
)  # fmt: skip
def test_each_window_of_a_mask_function_is_computed(sees):
    q, k, v = torch.randn(3, 2, 4, N, 16, generator=torch.Generator().manual_seed(0)).unbind()
    place = torch.arange(N)
    pairs = sees(place[:1], place[:1], place[:, None], place)
    found, _ = huggingface.attention(torch.nn.Identity(), q, k, v, huggingface.mask(2, N, N, mask_function=sees))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
    torch.testing.assert_close(found.transpose(1, 2), expected.nan_to_num(), atol=1e-5, rtol=0)


def test_the_name_is_none_of_flash_attentions():
    """transformers looks for "flash" in about 90 places, and would want a package of that name."""
    from transformers.utils.generic import is_flash_attention_requested

    assert not is_flash_attention_requested(requested_attention_implementation=huggingface.NAME)
    assert is_flash_attention_requested(requested_attention_implementation="flashgpt")


def test_the_mask_function_is_registered_too():
    """Without it the mask would be None, and padding ignored in silence."""
    assert transformers.AttentionMaskInterface()[huggingface.NAME] is huggingface.mask
    assert transformers.AttentionInterface()[huggingface.NAME] is huggingface.attention


def test_the_other_package_named_kernels_is_refused_in_one_line(tmp_path, monkeypatch):
    """transformers imports Hugging Face's `kernels` where it is installed, and would get our folder."""
    (tmp_path / "kernels-0.18.2.dist-info").mkdir()
    (tmp_path / "kernels-0.18.2.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    match = r"^the package kernels 0.18.2 is installed, and transformers imports .*\(uv pip uninstall kernels\)$"
    with pytest.raises(ImportError, match=match):
        runpy.run_path(huggingface.__file__)


def test_an_old_transformers_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    match = r"^transformers 4.57.6 is installed; gpt_triton needs 5.22 or later \(uv run --group hf\)$"
    with pytest.raises(ImportError, match=match):
        runpy.run_path(huggingface.__file__)


def test_a_transformers_that_is_too_early_is_named():
    """With 5.17 the test of OPT's packed documents fails."""
    for version in ("5.0.0", "5.17.0"):
        with pytest.warns(UserWarning, match=rf"^transformers {version} is installed; gpt_triton needs 5.22 or later"):
            huggingface.check_version(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("5.22.0", "5.23.0.dev0", "6.0.1"):
            huggingface.check_version(version)


def test_models_without_the_interface_keep_their_own(caplog):
    """ALiBi models of the library (BLOOM, MPT, Falcon) cannot be reached; transformers says so."""
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    model.set_attn_implementation(huggingface.NAME)
    assert model.config._attn_implementation != huggingface.NAME


# --- on a GPU


def on_gpu(model, dtype, name):
    return on("cuda", model, dtype, name)


def half_step(family, dtype, name):
    batch = {"input_ids": tokens(), "attention_mask": padding("left")}
    return step(on_gpu(build(family), dtype, name), {key: x.cuda() for key, x in batch.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_bfloat16_is_as_near_as_theirs(family):
    """Logits and gradients of a padded step: an error against float32 of at most twice their eager attention's."""
    exact = half_step(family, torch.float32, "eager")
    theirs, ours = (half_step(family, torch.bfloat16, name) for name in ("eager", huggingface.NAME))
    for right, eager, found in zip(exact, theirs, ours, strict=True):
        assert (found - right).norm() <= 2 * (eager - right).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_generate_on_a_gpu(family, cache):
    def run(model):
        ids, mask = tokens().cuda(), padding("left").cuda()
        options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        return model.generate(ids, attention_mask=mask, **options)

    theirs, ours = with_each(build(family).cuda(), run)
    assert torch.equal(theirs, ours)


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted({*DECODERS, *ENCODERS} - {"GptOss"}))  # whose experts wait
def test_no_wait_in_a_step_on_a_gpu(family):
    model = on_gpu(build(family), torch.bfloat16, huggingface.NAME)
    ids, mask = tokens().cuda(), padding("left").cuda()
    more = {"use_cache": False} if family in DECODERS else {}
    longer = torch.cat((mask, mask[:, -1:]), 1)

    def padded_step(_):
        model(ids, attention_mask=mask, **more).logits.float().sum().backward()

    def begun():
        """A cache with a token: theirs with a window wait where they begin."""
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
        return cache

    def decode(cache):
        with torch.no_grad():
            model(ids[:, 1:], attention_mask=mask, past_key_values=cache)
            model(ids[:, :1], attention_mask=longer, past_key_values=cache)

    for run, make in ((padded_step, object), (decode, begun))[: 1 + (family in DECODERS)]:
        run(make())  # compiles the kernels
        given = make()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
