"""The causality probe: silent on what is right, and a sentence for each classic mistake."""

import pytest
import torch

from kernels import naive_attention
from model import GPTConfig, KVCache, PagedKVCache, attention
from scripts import causality
from scripts.causality import probe
from tests.runs import replaced
from training.hardware import HardwareConfig, set_up

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARDWARE = set_up(HardwareConfig(device=DEVICE))
BOTH_DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
CACHES = ("KV cache", "paged KV cache")
ALL_RIGHT = dict.fromkeys(("model", "packing", *CACHES))


def config(name: str = "naive", **changes) -> GPTConfig:
    return GPTConfig(num_heads=12, n_embd=192, attention=name, **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"window": 100}, {"num_kv_heads": 3, "mlp": "swiglu", "qk_norm": True, "qk_gain": 30.0}]
)
@pytest.mark.parametrize(("name", "dtype"), [("naive", "float32"), ("naive", "bfloat16"), ("tiled", "bfloat16")])
def test_what_is_right_is_found_right(name, changes, dtype):
    hardware = set_up(HardwareConfig(device=DEVICE, dtype=dtype))
    assert probe(config(name, **changes), hardware) == ALL_RIGHT


def test_packing_is_probed_with_an_attention_that_can():
    other = "flash" if HARDWARE.device.type == "cuda" else "naive"
    assert probe(config("sdpa"), HARDWARE) == dict.fromkeys(("model", f"packing ({other})", *CACHES))


@pytest.mark.gpu
@BOTH_DTYPES
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", ["flash", "naive"])
def test_what_is_right_is_found_right_on_the_gpu(name, head_dim, dtype):
    hardware = set_up(HardwareConfig(device="cuda", dtype=dtype))
    for changes in ({}, {"window": 100}, {"num_kv_heads": 2}):
        assert probe(GPTConfig(num_heads=4, n_embd=4 * head_dim, attention=name, **changes), hardware) == ALL_RIGHT


def masked(sees):
    """Naive attention with the mask sees(query, key), both (N, N) of token numbers; the last query is the last key."""

    def attend(q, k, v, *, causal, documents=None, **options):
        query = torch.arange(q.size(2), device=q.device)[:, None] + k.size(2) - q.size(2)
        key = torch.arange(k.size(2), device=q.device)
        mask = sees(query, key)
        if documents is not None:
            number = torch.bucketize(key, documents.cu_seqlens[1:-1].to(key.dtype), right=True)
            mask = mask & (number[:, None] == number)
        repeats = q.size(1) // k.size(1)
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = (q @ k.mT / q.size(3) ** 0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=-1).nan_to_num() @ v

    return attend


def top_left(q, k, v, *, causal, documents=None, **options):
    """The mask that PyTorch's is_causal has where there are fewer queries than keys."""
    mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def wider_window(q, k, v, *, window, **options):
    return attention.ATTENTION["tiled"](q, k, v, window=(window[0] + 1, window[1]), **options)


def no_documents(q, k, v, *, documents=None, **options):
    return naive_attention(q, k, v, **options)


def documents_one_late(q, k, v, *, documents=None, **options):
    if documents is not None:
        cu_seqlens = documents.cu_seqlens.clone()
        cu_seqlens[1:-1] += 1
        documents = documents._replace(cu_seqlens=cu_seqlens, max_seqlen=documents.max_seqlen + 1)
    return attention.ATTENTION["tiled"](q, k, v, documents=documents, **options)


@pytest.mark.parametrize(
    ("wrong", "changes", "part", "says"),
    [
        (masked(lambda i, j: j <= i + 1), {}, "model", "token 0 sees token 1"),
        (masked(lambda i, j: j <= i + 1), {}, "KV cache", "token 0 sees token 1"),
        (masked(lambda i, j: (j < i) | (i + j == 0)), {}, "model", "token 1 does not see token 1"),
        (masked(lambda i, j: j * i < 0), {}, "model", "token 0 does not see token 0"),
        (top_left, {}, "KV cache", "token 5 does not see token 1"),
        (top_left, {}, "paged KV cache", "token 5 does not see token 1"),
        (wider_window, {"window": 9}, "model", "token 5 sees token 0"),
        (no_documents, {}, "packing", "token 7 sees token 0"),
        (documents_one_late, {}, "packing", "token 7 sees token 0"),
    ],
)
def test_a_wrong_mask_is_named(wrong, changes, part, says):
    with replaced("naive", wrong):
        found = probe(config(**changes), HARDWARE)
    assert found[part] == f"attention of layer 0: {says}"
    assert [name for name, fault in found.items() if fault], found


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(lambda i, j: j <= i + 1, "changing token 1 moves the logits of token 0"),
     (lambda i, j: (j <= i) & (j != 13), "changing token 13 does not move the logits of token 14")],
)  # fmt: skip
def test_logits_alone_tell_a_wrong_mask(wrong, says, monkeypatch):
    """Without a look at attention's matrix: as for attention that is not called through the registry."""
    monkeypatch.setattr(causality, "_wrong_attention", lambda *_: iter(()))
    with replaced("naive", masked(wrong)):
        assert probe(config(), HARDWARE)["model"] == says


@BOTH_DTYPES
@pytest.mark.parametrize("first", [0, 1])
def test_positions_that_do_not_begin_at_0_are_named(first, dtype, monkeypatch):
    """0: they go on through a row (the single token at 7 has nothing to tell them by); 1: each begins at 1."""
    from model import gpt

    real = gpt.positions_in

    def positions_in(cu_seqlens, num_tokens):
        if first:
            return (real(cu_seqlens, num_tokens) + 1) % causality.SEQ_LEN
        return torch.arange(num_tokens, device=cu_seqlens.device) % causality.SEQ_LEN

    monkeypatch.setattr(gpt, "positions_in", positions_in)
    found = probe(config(), set_up(HardwareConfig(device=DEVICE, dtype=dtype)))
    assert found == ALL_RIGHT | {"packing": found["packing"]}
    assert f"the document at token {0 if first else 8} has other logits than alone" in found["packing"]


def test_a_cache_that_forgets_is_named(monkeypatch):
    real = KVCache.read

    def read(self, layer, places, dtype):
        keys, values = real(self, layer, places, dtype)
        return keys, values.roll(1, dims=2)

    monkeypatch.setattr(KVCache, "read", read)
    found = probe(config(), HARDWARE)
    assert found == ALL_RIGHT | {name: found[name] for name in CACHES}
    assert all(found[name] for name in CACHES)


def test_a_page_in_another_s_place_is_named(monkeypatch):
    """Both pages of the row are taken for the first."""
    real = PagedKVCache.places
    monkeypatch.setattr(PagedKVCache, "places", lambda self, rows, slots: real(self, rows, slots % self.page))
    found = probe(config(), HARDWARE)
    assert found == ALL_RIGHT | {"paged KV cache": found["paged KV cache"]}
    assert found["paged KV cache"]


@BOTH_DTYPES
def test_cached_positions_that_begin_anew_are_named(dtype, monkeypatch):
    real = causality._small_model

    def small_model(*arguments):
        model = real(*arguments)

        def forget(block, inputs):
            x, _, _, cache, *rest = inputs
            rows = len(cache.reserved)
            positions = torch.arange(x.size(1) // rows, device=x.device).repeat(rows)
            return x, model.cos[positions], model.sin[positions], cache, *rest

        for block in model.blocks:
            block.register_forward_pre_hook(lambda b, i: forget(b, i) if i[3] is not None else None)
        return model

    monkeypatch.setattr(causality, "_small_model", small_model)
    found = probe(config(), set_up(HardwareConfig(device=DEVICE, dtype=dtype)))
    assert found == ALL_RIGHT | {name: found[name] for name in CACHES}
    assert all("has other logits than alone" in found[name] for name in CACHES)
