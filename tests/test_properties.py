"""Any call is right: shapes, options and strides drawn by hypothesis, held to the float64 oracle.

On a CPU the kernels run in the interpreter, where one example costs about a second; the examples are the same
each time. `tests/fuzz.py` draws thousands on a GPU.
"""

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

from kernels import flash_attention, flash_attention_varlen, tiled_attention, tiled_attention_varlen
from tests.attention_checks import compare_with_oracle, make_packed, make_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {"derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}

bounds = st.integers(-1, 40)


@st.composite
def options(draw, heads: int, rows: int) -> dict:
    """Any subset of the options."""
    chosen = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.4, -0.2]))}
    if draw(st.booleans()):
        chosen["window"] = (draw(bounds), draw(bounds))
    if draw(st.booleans()):
        chosen["softcap"] = draw(st.sampled_from([0.5, 3.0, 50.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    if draw(st.booleans()):
        shape = (heads,) if draw(st.booleans()) else (rows, heads)
        chosen["alibi_slopes"] = torch.rand(shape, generator=generator).to(DEVICE)
    if draw(st.booleans()):
        chosen["sinks"] = torch.randn(heads, generator=generator).to(DEVICE)
    if draw(st.booleans()):
        chosen["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 0.9]))
        chosen["dropout_seed"] = draw(st.integers(0, 2**63 - 1))
    return chosen


@st.composite
def dense_calls(draw):
    batch, kv_heads, group = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2)]))
    num_q = draw(st.integers(1, 40))
    layout = draw(st.sampled_from(["bhnd", "bnhd", "strided", "padded", "packed"]))
    num_k = num_q if layout == "packed" else draw(st.integers(1, 50))
    head_dim = draw(st.sampled_from([16, 17, 24, 32]))
    head_dim_v = head_dim if layout == "packed" else draw(st.sampled_from([16, 24, 40]))
    sizes = (batch, kv_heads * group, kv_heads, num_q, num_k, head_dim)
    qkv = make_qkv(*sizes, head_dim_v=head_dim_v, layout=layout, device=DEVICE, seed=draw(st.integers(0, 99)))
    return qkv, draw(options(kv_heads * group, sizes[0]))


@st.composite
def packed_calls(draw):
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    documents = draw(st.lists(st.tuples(st.integers(0, 35), st.integers(0, 35)), min_size=1, max_size=4))
    lengths_q, lengths_k = map(list, zip(*documents, strict=True))
    lengths_q[0] += 1  # one query at least
    sizes = (kv_heads * group, kv_heads, draw(st.sampled_from([16, 24])))
    qkv, arguments = make_packed(lengths_q, lengths_k, *sizes, device=DEVICE, seed=draw(st.integers(0, 99)))
    return qkv, arguments | draw(options(kv_heads * group, len(documents)))


# float32 keeps P = exp(S - LSE) only to 2^-24 of S and LSE, where the naive softmax subtracts exactly: the scale
# and the soft-cap of 50 above make scores large enough to show it
FACTOR = 8.0


@settings(max_examples=7, **SETTINGS)
@given(dense_calls())
def test_any_dense_call(call):
    qkv, chosen = call
    compare_with_oracle(flash_attention, *qkv, factor=FACTOR, **chosen)


@settings(max_examples=5, **SETTINGS)
@given(packed_calls())
def test_any_packed_call(call):
    qkv, chosen = call
    compare_with_oracle(flash_attention_varlen, *qkv, factor=FACTOR, **chosen)


@settings(max_examples=30, **SETTINGS)
@given(st.one_of(dense_calls(), packed_calls()), st.integers(1, 50), st.integers(1, 50))
def test_the_two_references_agree(call, block_q, block_k):
    """In float64, where neither rounds: tile sizes included."""
    qkv, chosen = call
    attention = tiled_attention_varlen if "cu_seqlens_q" in chosen else tiled_attention

    def tiled(*args, **kwargs):
        return attention(*args, block_q=block_q, block_k=block_k, **kwargs)

    qkv = [x.detach().double().requires_grad_() for x in qkv]
    compare_with_oracle(tiled, *qkv, **chosen)
