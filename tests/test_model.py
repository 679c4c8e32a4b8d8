"""The network: backends, causality, padding, the loss, initialisation, recomputation, compilation, sizes."""

import copy
import dataclasses
import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import ATTENTION, GPT, GPTConfig, resolve_attention, resolve_model
from model.attention import SHORT, attend_with
from model.cache import KVCache, PagedKVCache
from model.embedding import embed, embedding_bwd
from model.gpt import Block
from model.inference import can_fuse
from model.positions import rope_tables

VOCAB = 65  # padded to 128
SEQ_LEN = 32


def small_config(**changes) -> GPTConfig:
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "n_embd": 64, "attention": "sdpa", "loss": "plain"}
    return GPTConfig(**(sizes | changes))


def small_gpt(seed: int = 0, **changes) -> GPT:
    return GPT(small_config(**changes), VOCAB, SEQ_LEN, generator=torch.Generator().manual_seed(seed))


def batch(rows: int = 2, length: int = SEQ_LEN, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return stream[:, :-1], stream[:, 1:]


def loss_and_gradients(model: GPT, tokens, targets) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def needs(backend: str, head_dim: int = 16) -> None:
    if backend == "flash":
        from kernels import why_not

        reason = why_not("flash", torch.float32, device="cpu", head_dim=head_dim)
        if reason is not None:
            pytest.skip(reason)


# ---- attention backends


@pytest.mark.parametrize("backend", ["naive", "tiled", "flash"])
def test_backends_give_the_same_loss_and_gradients(backend):
    needs(backend)
    tokens, targets = batch(length=19)  # odd: the last tile is ragged
    expected = loss_and_gradients(small_gpt(), tokens, targets)
    actual = loss_and_gradients(small_gpt(attention=backend), tokens, targets)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", ["naive", "tiled", "sdpa", "flash"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(7, 7), (1, 9), (5, 9)])
def test_backends_align_the_causal_mask_bottom_right(backend, num_queries, num_keys):
    needs(backend)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, num_queries, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, num_keys, 16, generator=generator)
    actual = ATTENTION[backend](q, k, v, causal=True)
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    row, column = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    scores = (q @ k.mT / 4).masked_fill(column > row + num_keys - num_queries, -math.inf)
    torch.testing.assert_close(actual, scores.softmax(-1) @ v, rtol=1e-4, atol=1e-5)


def errors_of_sdpa(tokens, scale, causal, dtype):
    """(error, the formula's error, norm of the exact result) of O, dQ, dK and dV."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 2, tokens, 3, 16, generator=generator).to(dtype).transpose(2, 3)  # as in a model
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def results(backend, dtype):
        o = ATTENTION[backend](*(x.to(dtype) for x in inputs), causal=causal, scale=scale)
        return o, *torch.autograd.grad(o, inputs, do.to(dtype))

    exact = results("naive", torch.float64)
    for ours, formula, right in zip(results("sdpa", dtype), results("naive", dtype), exact, strict=True):
        assert ours.dtype == dtype
        yield (ours - right).norm(), (formula - right).norm(), right.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "scale"), [(1, None), (19, None), (SHORT, 0.4), (SHORT + 1, None)])
def test_sdpa_in_bfloat16_on_a_cpu_errs_no_more_than_the_formula(tokens, scale, causal):
    """Short sequences are products of matrices, longer ones PyTorch's kernel in float32; forward and backward."""
    for ours, formula, _ in errors_of_sdpa(tokens, scale, causal, torch.bfloat16):
        assert ours <= 1.1 * formula + 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "scale"), [(19, None), (SHORT, 0.4), (SHORT + 1, None)])
def test_sdpa_in_float32_on_a_cpu_errs_by_roundings_of_it(tokens, scale, dtype):
    """The formula in float16 computes in it, and ours in float32."""
    for ours, formula, size in errors_of_sdpa(tokens, scale, True, dtype):
        assert ours <= (1e-6 * size if dtype == torch.float32 else 1.1 * formula)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa_is_the_kernel_of_pytorchs_that_it_is_held_to(dtype):
    """On a CPU our products of matrices ran in its place, and a benchmark timed them under its name."""
    q = torch.randn(1, 2, 19, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        held = ATTENTION["sdpa"](q, q, q, causal=True)
    own = F.scaled_dot_product_attention(*[q.float()] * 3, is_causal=True).to(dtype)
    assert torch.equal(held, own)
    assert not torch.equal(ATTENTION["sdpa"](q, q, q, causal=True), own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_short_attention_on_a_cpu_is_compiled_whole(dtype):
    """In bfloat16 the graph broke at each layer."""
    q = torch.randn(1, 2, 19, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    compiled = torch.compile(partial(ATTENTION["sdpa"], causal=True), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, q, q), ATTENTION["sdpa"](q, q, q, causal=True))


def test_tiled_takes_block_sizes():
    q = torch.randn(1, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    small_tiles = ATTENTION["tiled"](q, q, q, causal=True, block_q=3, block_k=4)
    torch.testing.assert_close(small_tiles, ATTENTION["sdpa"](q, q, q, causal=True), rtol=1e-4, atol=1e-5)


def test_every_backend_starts_from_the_same_weights():
    expected = small_gpt().state_dict()
    actual = small_gpt(attention="naive").state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_auto_takes_sdpa_off_cuda_and_says_why():
    name, reason = resolve_attention("auto", "cpu", torch.float32, 64)
    assert name == "sdpa"
    assert "cpu" in reason


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa"])
def test_an_explicit_name_stays_itself(name):
    assert resolve_attention(name, "cpu", torch.float32, 64)[0] == name


def test_an_explicit_name_that_cannot_run_raises_with_the_reason(monkeypatch):
    answers = {"flash": "flash needs a better machine"}
    monkeypatch.setattr("kernels.why_not", lambda name, *_, **__: answers.get(name))
    with pytest.raises(ValueError, match="attention=flash cannot run: flash needs a better machine"):
        resolve_attention("flash", "cuda", torch.bfloat16, 64)
    for unknown in ("flsh", "kvcache"):  # kernels know the second, models do not
        with pytest.raises(ValueError, match=f"attention={unknown} is not known; use one of auto, flash, naive, tiled"):
            resolve_attention(unknown, "cuda", torch.bfloat16, 64)
    name, reason = resolve_attention("auto", "cuda", torch.bfloat16, 64)
    assert name == "sdpa"
    assert "flash needs a better machine" in reason


@pytest.mark.parametrize("key", ["attention", "loss"])
def test_a_model_takes_resolved_names_only(key):
    with pytest.raises(
        ValueError, match=rf"model\.{key}=auto must be resolved before GPT; give it the config of resolve_model"
    ):
        small_gpt(**{key: "auto"})


def test_resolving_leaves_the_configuration_as_it_is():
    config = small_config(attention="auto", loss="auto")
    found, why_attention, why_loss = resolve_model(config, "cpu", torch.float32)
    assert (config.attention, config.loss) == ("auto", "auto")
    assert (found.attention, found.loss) == ("sdpa", "plain")
    assert why_attention == "auto: the device is cpu, flash is for CUDA"
    assert why_loss == "auto: the device is cpu"


def test_auto_takes_flash_on_cuda(monkeypatch):
    monkeypatch.setattr("kernels.why_not", lambda *_, **__: None)
    assert resolve_attention("auto", "cuda", torch.bfloat16, 64)[0] == "flash"


# ---- what a forward means


@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "relu2"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_no_position_sees_a_later_token(mlp, qk_norm):
    model = small_gpt(mlp=mlp, qk_norm=qk_norm)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])
    assert (before[:, 21:] - after[:, 21:]).abs().amax() > 0  # and later ones do see it


def test_order_matters():
    """Without rotary positions, swapping two earlier tokens would leave the last logits as they are."""
    model = small_gpt(num_layers=1)
    tokens, _ = batch()
    swapped = tokens.clone()
    swapped[:, [3, 4]] = tokens[:, [4, 3]]
    assert (tokens[:, 3] != tokens[:, 4]).all()
    with torch.no_grad():
        assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().amax() > 1e-4


def test_rotary_scores_depend_on_distance_alone():
    from kernels.fused.rotary import rotate

    cos, sin = rope_tables(SEQ_LEN, 16, 10000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(i: int, j: int) -> torch.Tensor:
        return (rotate(q, cos[i : i + 1], sin[i : i + 1]) * rotate(k, cos[j : j + 1], sin[j : j + 1])).sum()

    torch.testing.assert_close(score(9, 4), score(25, 20))
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


def test_rotary_angles_are_exact_at_positions_far_out():
    cos, sin = rope_tables(40_001, 16, 10000.0)
    for pair in range(8):
        angle = 40_000 * 10000.0 ** (-pair / 8)
        assert abs(cos[-1, 0, pair].item() - math.cos(angle)) < 1e-6
        assert abs(sin[-1, 0, 8 + pair].item() - math.sin(angle)) < 1e-6


def test_logits_cover_the_vocabulary_and_not_its_padding():
    model = small_gpt()
    tokens, targets = batch()
    assert model.embedding.weight.size(0) == 128
    assert model(tokens).shape == (2, SEQ_LEN, VOCAB)
    gradients = loss_and_gradients(model, tokens, targets)
    assert torch.count_nonzero(gradients["embedding.weight"][VOCAB:]) == 0
    with torch.no_grad():
        expected = model(tokens, targets)
        model.embedding.weight[VOCAB:] = 1e4  # would win every softmax it took part in
        assert torch.equal(model(tokens, targets), expected)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_loss_is_the_sum_of_cross_entropies(tie_embeddings):
    model = small_gpt(tie_embeddings=tie_embeddings)
    tokens, targets = batch()
    loss = model(tokens, targets)
    expected = F.cross_entropy(model(tokens).reshape(-1, VOCAB).double(), targets.reshape(-1), reduction="sum")
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_micro_batches_add_up_to_the_whole_batch():
    model = small_gpt()
    tokens, targets = batch(rows=4)
    whole = loss_and_gradients(model, tokens, targets)
    parts = [loss_and_gradients(model, tokens[i : i + 1], targets[i : i + 1]) for i in range(4)]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts), value, rtol=1e-4, atol=1e-4)


def test_ignored_targets_count_for_nothing():
    model = small_gpt()
    tokens, targets = batch()
    masked = targets.clone()
    masked[:, 10:] = -1
    expected = model(tokens[:, :10], targets[:, :10])
    torch.testing.assert_close(model(tokens, masked), expected, rtol=1e-5, atol=0)


def test_loss_under_bf16_autocast_is_fp32_and_close():
    model = small_gpt(qk_norm=True)
    tokens, targets = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
        assert model(tokens).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert small_gpt().bfloat16()(tokens, targets).dtype == torch.float32
    torch.testing.assert_close(loss, model(tokens, targets), rtol=1e-2, atol=0)


def test_float64_keeps_its_dtype_under_autocast():
    """PyTorch casts no float64; the cache was in bfloat16."""
    model = small_gpt().double()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.make_cache(1).keys.dtype == torch.float64


def test_qk_gain_multiplies_the_scores():
    model = small_gpt(qk_norm=True, qk_gain=1.7)
    tokens, _ = batch()

    def scaled(layer, attend):
        def attend_with_scale(q, k, v, *, scale, **options):
            assert scale is None
            return attend(1.7 * q, k, v, **options)

        return attend_with_scale

    other = small_gpt(qk_norm=True)
    with attend_with(other, scaled):
        torch.testing.assert_close(model(tokens), other(tokens))
    assert not torch.allclose(model(tokens), other(tokens))


def test_dropout_is_of_the_embeddings_and_of_what_each_part_adds(monkeypatch):
    seen, model = [], small_gpt(dropout=0.25)
    monkeypatch.setattr("model.gpt.F.dropout", lambda x, p, training: seen.append((p, training)) or x)
    model(batch()[0])
    model.eval()(batch()[0])
    places = 1 + 2 * len(model.blocks)
    assert seen == [(0.25, True)] * places + [(0.25, False)] * places


def test_a_context_beyond_seq_len_is_refused():
    with pytest.raises(ValueError, match=r"context of 33 tokens .* seq_len=32"):
        small_gpt()(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], r"tokens are list; give ids as an int64 tensor of at least one token, \(B, N\)"),
        (torch.zeros(8, dtype=torch.int64), r"tokens are torch.int64 \(8,\); give ids"),
        (torch.zeros(1, 2, 8, dtype=torch.int64), r"tokens are torch.int64 \(1, 2, 8\); give ids"),
        (torch.zeros(2, 0, dtype=torch.int64), r"tokens are torch.int64 \(2, 0\); give ids"),
        (torch.zeros(2, 8), r"tokens are torch.float32 \(2, 8\); give ids"),
        (torch.ones(2, 8, dtype=torch.bool), r"tokens are torch.bool \(2, 8\); give ids"),
    ],
)
def test_tokens_of_another_kind_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        small_gpt()(tokens)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_targets_of_another_shape_are_refused(loss):
    """Of as many tokens in another order they would be those of other tokens."""
    tokens, targets = batch(rows=2, length=8)
    for given in (targets.T, targets.flatten(), targets[:, :4], targets.tolist()):
        with pytest.raises(ValueError, match=r"targets are (torch.int64|list).*; expected the tokens' shape, \(2, 8\)"):
            small_gpt(loss=loss)(tokens, given)


def test_documents_of_another_kind_are_refused():
    tokens = batch(rows=2, length=8)[0]
    whole = torch.tensor([0, 8, 16], dtype=torch.int32)
    for given in (whole.tolist(), whole.float(), whole.long(), whole[None], whole[:1]):
        with pytest.raises(ValueError, match=r"cu_seqlens are (list|torch.*\)); expected int32 \(documents"):
            small_gpt()(tokens, cu_seqlens=given)


def test_ids_of_32_bits_and_a_single_document_are_taken_and_beside_a_cache_tokens_alone():
    model, (tokens, targets) = small_gpt(attention="naive"), batch(rows=1, length=8)
    whole, expected = torch.tensor([0, 8], dtype=torch.int32), model(tokens)
    assert torch.equal(model(tokens.int()), expected)
    torch.testing.assert_close(model(tokens, cu_seqlens=whole), expected)
    cache = model.make_cache(1)
    cache.allocate(0)
    cache.extend([0], 8)
    for given in ({"targets": targets}, {"cu_seqlens": whole}):
        with pytest.raises(ValueError, match="kv_cache goes with tokens alone; leave targets and cu_seqlens out"):
            model(tokens, kv_cache=cache, **given)


@pytest.mark.parametrize("page", [None, 16])
def test_a_cache_of_another_model_is_refused(page):
    tokens = batch(rows=1, length=4)[0]
    for changes, max_tokens in (({"num_layers": 1}, 32), ({"num_kv_heads": 4}, 32), ({"n_embd": 32}, 32), ({}, 33)):
        config = small_config(**changes)
        cache = KVCache(config, 1, max_tokens) if page is None else PagedKVCache(config, 1, max_tokens, None, page)
        cache.allocate(0)
        cache.extend([0], 4)
        for given in (cache, cache.prompts([0])):
            with pytest.raises(
                ValueError, match=r"the KV cache has .*; the model has 2 of 2 of 16 and seq_len=32: make"
            ):
                small_gpt()(tokens, kv_cache=given)
        assert cache.stored == [0]


# ---- initialisation


def test_initial_loss_is_that_of_a_uniform_guess():
    tokens, targets = batch(rows=8)
    loss = small_gpt()(tokens, targets).item() / targets.numel()
    assert abs(loss - math.log(VOCAB)) < 0.1


def test_initial_weights_have_their_standard_deviations():
    model = small_gpt(num_layers=4, n_embd=128)
    for name, weight in model.named_parameters():
        writes_residual = name.endswith(("out.weight", "down.weight"))
        expected = 0.02 / math.sqrt(8) if writes_residual else 0.02
        assert abs(weight.std().item() / expected - 1) < 0.05, name  # 8,192 numbers: error of 0.8 %
        assert abs(weight.mean().item()) < 0.05 * expected, name


def test_weights_come_from_the_given_generator():
    state = torch.get_rng_state()
    first, again, other = small_gpt(seed=3), small_gpt(seed=3), small_gpt(seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.embedding.weight, again.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    torch.manual_seed(5)
    from_global = GPT(small_config(), VOCAB, SEQ_LEN)
    torch.manual_seed(5)
    assert torch.equal(from_global.embedding.weight, GPT(small_config(), VOCAB, SEQ_LEN).embedding.weight)


def test_parameters_are_counted():
    model = small_gpt(tie_embeddings=False)
    attention = 64 * (64 + 2 * 32) + 64 * 64
    hidden = 2 * (attention + 2 * 64 * 256)
    assert model.num_parameters() == hidden + 2 * 128 * 64
    assert small_gpt().num_parameters() == hidden + 128 * 64


def test_swiglu_has_as_many_weights_as_gelu():
    assert GPTConfig(mlp="swiglu").mlp_width == 2048  # 3 x 2,048 = 2 x 3,072
    assert GPTConfig(mlp="swiglu", n_embd=192).mlp_width == 512
    assert GPTConfig(mlp="swiglu", n_embd=216).mlp_width == 576  # 8/3 x 216 rounded up to a multiple of 64


# ---- recomputation and compilation


@pytest.mark.parametrize("mode", ["pointwise", "full", "selective"])
def test_recomputation_changes_no_bit_of_the_gradients(mode):
    tokens, targets = batch()

    def run(**changes) -> dict[str, torch.Tensor]:
        model = small_gpt(num_layers=4, dropout=0.2, attention_dropout=0.1, attention="naive", **changes).train()
        torch.manual_seed(7)  # the dropout masks
        return loss_and_gradients(model, tokens, targets)

    expected, actual = run(), run(activation_checkpointing=mode)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    ("mode", "forwards"), [("none", [1, 1, 1]), ("pointwise", [1, 1, 1]), ("full", [2, 2, 2]), ("selective", [2, 2, 2])]
)
def test_only_the_chosen_blocks_run_twice(mode, forwards):
    model = small_gpt(num_layers=3, activation_checkpointing=mode)
    counts = [0, 0, 0]
    for layer, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(lambda *_, layer=layer: counts.__setitem__(layer, counts[layer] + 1))
    model(*batch()).backward()
    assert counts == forwards


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("sdpa", "pointwise"), ("flash", "none"), ("flash", "full"), ("flash", "selective")],
)
def test_compiles_into_one_graph(backend, mode):
    needs(backend)
    tokens, targets = batch(rows=1, length=8)
    torch.compiler.reset()  # every model of a process counts towards the limit of GPT.forward's compilations
    model = small_gpt(num_layers=1, attention=backend, activation_checkpointing=mode, qk_norm=True)
    expected = loss_and_gradients(model, tokens, targets)
    model.zero_grad()
    # aot_eager traces forward and backward as inductor would, and needs no C++ compiler
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected["loss"], rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)


def test_selective_recomputation_keeps_attention(monkeypatch):
    """Attention runs once a layer where its output is kept, twice where all is recomputed."""
    needs("flash")
    from kernels.portable import forward as flash_fwd

    launches, launch = [], flash_fwd.launch_flash_fwd
    monkeypatch.setattr(flash_fwd, "launch_flash_fwd", lambda *args: launches.append(1) or launch(*args))
    for mode, expected in (("full", 4), ("selective", 2)):
        launches.clear()
        small_gpt(attention="flash", activation_checkpointing=mode)(*batch(length=8)).backward()
        assert len(launches) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_flash_trains_like_sdpa_on_the_gpu(mode):
    """Ten compiled bf16 steps from the same weights: the losses differ by rounding alone."""

    def losses(attention: str) -> list[float]:
        config = small_config(n_embd=256, attention=attention, activation_checkpointing=mode)
        generator = torch.Generator().manual_seed(0)
        model = GPT(config, VOCAB, 256, device="cuda", generator=generator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compiled = torch.compile(model, fullgraph=True)
        tokens, targets = (t.cuda() for t in batch(rows=4, length=255))
        history = []
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(tokens, targets) / targets.numel()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    flash, sdpa = losses("flash"), losses("sdpa")
    assert flash[-1] < flash[0] - 0.5
    assert max(abs(a - b) for a, b in zip(flash, sdpa, strict=True)) < 1e-2


# ---- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"num_layers": "2"}, "model.num_layers='2' must be a whole number"),
        ({"num_layers": True}, "model.num_layers=True must be a whole number"),
        ({"window": 2.5}, "model.window=2.5 must be a whole number or None"),
        ({"tie_embeddings": "no"}, "model.tie_embeddings='no' must be True or False"),
        ({"dropout": "0.1"}, "model.dropout='0.1' must be a number"),
        ({"mask": 5}, "model.mask=5 must be a text or None"),
        ({"num_kv_heads": 0}, "model.num_kv_heads=0 must be at least 1"),
        ({"mlp_hidden": -3}, "model.mlp_hidden=-3 must be at least 1"),
        ({"n_embd": 66}, "model.n_embd=66 is not a multiple of model.num_heads=4; use n_embd=72"),
        ({"num_kv_heads": 3}, "model.num_kv_heads=3 does not divide model.num_heads=4; use one of 1, 2, 4"),
        ({"n_embd": 60}, "odd head_dim 15, and RoPE turns pairs; use n_embd=64"),
        ({"dropout": 1.0}, "model.dropout=1.0 must be at least 0 and below 1"),
        ({"dropout": -0.1}, "model.dropout=-0.1 must be at least 0 and below 1"),
        ({"attention_dropout": 1.5}, "model.attention_dropout=1.5 must be at least 0 and below 1"),
        ({"dropout": math.nan}, "model.dropout=nan must be at least 0 and below 1"),
        ({"rope_base": 0.0}, "model.rope_base=0.0 must be a number above 1"),
        ({"qk_norm": True, "qk_gain": 0.0}, "model.qk_gain=0.0 must be from 1e-20 to 1e20; 1 leaves scores"),
        ({"qk_norm": True, "qk_gain": math.inf}, "model.qk_gain=inf must be from 1e-20 to 1e20"),
        ({"qk_norm": True, "qk_gain": 1e-40}, "model.qk_gain=1e-40 must be from 1e-20 to 1e20"),
        ({"qk_gain": 1.5}, "model.qk_gain=1.5 needs model.qk_norm=true; set that, or use model.qk_gain=1"),
        ({"mlp": "silu"}, "model.mlp=silu is unknown; use one of gelu, swiglu, relu2"),
        ({"attention": "fa2"}, "model.attention=fa2 is unknown; use one of auto, flash, naive, tiled, sdpa"),
        ({"activation_checkpointing": "all"}, "is unknown; use one of none, pointwise, full, selective"),
    ],
)
def test_an_impossible_configuration_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        small_config(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("n_embd", [32, 4 * 320])
def test_a_head_dim_that_flash_cannot_take_is_refused_before_the_model_is_built(n_embd):
    with pytest.raises(ValueError, match=rf"attention=flash cannot run: head_dim {n_embd // 4} .*\(16 to 256\)"):
        resolve_model(small_config(attention="flash", n_embd=n_embd), "cuda", torch.bfloat16)


def test_a_changed_configuration_is_checked_again():
    config = dataclasses.replace(small_config(), num_heads=8)
    assert (config.head_dim, config.kv_heads) == (8, 2)
    config.num_kv_heads = 5
    with pytest.raises(ValueError, match="num_kv_heads=5"):
        GPT(config, VOCAB, SEQ_LEN)


def test_the_embeddings_gradient_is_pytorchs():
    """Behind an operator of its own, so that a compiler leaves its order of addition alone."""
    table = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    tokens, do = torch.randint(9, (3, 50)), torch.randn(3, 50, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(F.embedding(tokens, table), table, do)
    (actual,) = torch.autograd.grad(embed(tokens, table), table, do)
    assert torch.equal(actual, expected)
    torch.library.opcheck(embedding_bwd, (do, tokens, 9))


@pytest.mark.parametrize(("module", "match"), [
    (None, r"^model.name needs transformers \(.*\); `uv run --group hf` brings it$"),
    (SimpleNamespace(__version__="4.57.6", AttentionInterface=None, AttentionMaskInterface=None),
     r"^model.name needs transformers: transformers 4.57.6 is installed; gpt_triton needs 5.22 or later"),
])  # fmt: skip
def test_a_model_of_transformers_without_it_or_with_an_old_one(module, match, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", module)
    for name in ("huggingface", "huggingface_model", "huggingface_masks"):
        monkeypatch.delitem(sys.modules, f"model.{name}", raising=False)
        monkeypatch.delattr(f"model.{name}", raising=False)
    with pytest.raises(ValueError, match=match) as error:
        resolve_model(GPTConfig(name="somebody/something"), "cpu", torch.float32)
    assert "\n" not in str(error.value)
    for name in ("huggingface", "huggingface_model", "huggingface_masks"):  # what it imported in their place
        sys.modules.pop(f"model.{name}", None)


@pytest.mark.gpu
def test_on_the_gpu_a_row_that_is_looked_up_often_has_a_gradient_of_the_same_bits():
    tokens = torch.randint(65, (64, 256), device="cuda")
    do = torch.randn(64, 256, 384, device="cuda")
    first, *others = (embedding_bwd(do, tokens, 128) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_fused_products_of_a_step_give_the_same_logits(qk_norm, mlp, monkeypatch):
    """On a GPU a step of generation is `decode` of model/inference.py; here its operators are what they stand for."""
    config = GPTConfig(num_layers=2, num_heads=4, num_kv_heads=2, n_embd=64, attention="naive", loss="plain", mlp=mlp)
    config = dataclasses.replace(config, qk_norm=qk_norm)
    model = GPT(config, 50, 32, generator=torch.Generator().manual_seed(0)).eval()
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        for fused in (False, True):
            monkeypatch.setattr("model.inference.takes_skinny_linear", lambda x, fused=fused: fused)
            cache = model.make_cache(3)
            for row in range(3):
                cache.allocate(row)
            for first, last in ((0, 5), (5, 6), (6, 9)):
                cache.extend([0, 1, 2], last - first)
                logits = model(tokens[:, first:last], kv_cache=cache)
                torch.testing.assert_close(logits, expected[:, first:last], rtol=1e-4, atol=1e-5)


def test_a_move_that_fails_leaves_the_model_whole(monkeypatch):
    model, tokens = small_gpt(), torch.randint(VOCAB, (1, SEQ_LEN))
    expected = model(tokens)

    def fail(x):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        model._apply(fail)
    assert torch.equal(model(tokens), expected)


def test_tables_are_made_again_wherever_the_weights_come_from():
    """fp32 beside weights of 16 bits, and of an empty model, too: PyTorch would cast them, or leave them empty."""
    model, tokens = small_gpt(), torch.randint(VOCAB, (1, SEQ_LEN))
    expected = model(tokens)
    for assign in (False, True):
        other = GPT(small_config(), VOCAB, SEQ_LEN, device="meta")
        if not assign:
            other.to_empty(device="cpu")
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(tokens), expected)
    with torch.device("meta"):
        other = GPT(small_config(), VOCAB, SEQ_LEN)
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), expected)
    cos = model.cos
    model.load_state_dict(other.state_dict())
    assert model.cos is cos, "a captured graph may read it"
    half = copy.deepcopy(model).bfloat16()
    assert half.cos.dtype == torch.float32
    assert torch.equal(half.float().sin, model.sin)
    assert not {"cos", "sin"} & model.state_dict().keys()


def test_a_block_of_other_parts_is_called_and_not_fused():
    class Experts(torch.nn.Module):
        attention = None

    assert not can_fuse(Experts())


CHANGES = "bias", "class", "hook", "block's hook", "every hook", "MLP", "block", "forward", "transposed weight"


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_around_a_product_is_there_in_a_step_of_generation(change, monkeypatch, request):
    """As LoRA, probes and quantization do. On a GPU the few tokens of a step go through fused products."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    monkeypatch.setattr("model.inference.takes_skinny_linear", lambda x: not torch.is_grad_enabled())
    model, tokens = small_gpt().eval(), torch.randint(VOCAB, (1, 8))
    block = model.blocks[1]
    assert can_fuse(block)
    match change:
        case "bias":
            block.mlp.up.bias = torch.nn.Parameter(torch.ones(block.mlp.up.out_features))
        case "class":
            block.attention.out.__class__ = Doubled
        case "hook":
            block.attention.qkv.register_forward_hook(lambda module, inputs, output: 2 * output)
        case "block's hook":
            block.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0], *inputs[1:]))
        case "every hook":
            hook = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
            request.addfinalizer(hook.remove)
        case "MLP":
            block.mlp = torch.nn.Sequential(block.mlp, torch.nn.Tanh())
        case "block":
            block.__class__ = type("Twice", (Block,), {"compute": lambda self, x, *a: 2 * Block.compute(self, x, *a)})
        case "forward":
            own = block.mlp.forward
            block.mlp.forward = lambda x: -own(x)
        case "transposed weight":
            block.mlp.up.weight = torch.nn.Parameter(block.mlp.up.weight.detach().T.contiguous().T)
    assert not can_fuse(block)
    with torch.no_grad():
        cache, steps = model.make_cache(1), []
        cache.allocate(0)
        for token in tokens[0]:
            cache.extend([0], 1)
            steps.append(model(token.view(1, 1), kv_cache=cache))
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens))
