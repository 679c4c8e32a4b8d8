"""Generation: the KV cache against an uncached forward, the choice of a token, and the loop around it."""

import copy
import gc
from array import array
from contextlib import nullcontext
from functools import partial
from threading import Lock
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, GPTConfig, attend_with, generate
from model.generation import Continuation, Generation, Step
from model.generation_state import IDLE, StepState
from model.inference import decode, prefill
from model.sampling import choose_next_token, likeliest

VOCAB = 65
SEQ_LEN = 32


def small_gpt(**changes) -> GPT:
    """A model whose logits are far enough apart that its greedy text does not hang on rounding."""
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "n_embd": 64, "attention": "sdpa", "loss": "plain"}
    sizes["tie_embeddings"] = False  # an untrained tied head repeats its input
    generator = torch.Generator().manual_seed(0)
    model = GPT(GPTConfig(**(sizes | changes)), VOCAB, SEQ_LEN, generator=generator)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6)
    return model


def prompt(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def text(model: GPT, tokens, **options) -> list[list[int]]:
    """All samples of one prompt at once."""
    return texts(model, [list(map(int, tokens))], **options)


def texts(model: GPT, prompts: list[list[int]], **options) -> list[list[int]]:
    """All of a generation at once: the tokens of each sequence."""
    found = [[] for _ in range(len(prompts) * options.get("num_samples", 1))]
    for step in generate(model, prompts, **options):
        for sequence, token in step:
            found[sequence].append(token)
    return found


# ---- KV cache


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", [[32], [10, 1, 1, 20], [1] * 6])
def test_cached_logits_are_the_uncached_ones(num_kv_heads, pieces, page):
    model = small_gpt(num_kv_heads=num_kv_heads, qk_norm=True, qk_gain=1.7).eval()
    tokens = prompt(sum(pieces), rows=2)
    cache = model.make_cache(2, page=page)
    actual = []
    for row in range(2):
        cache.allocate(row)
    with torch.no_grad():
        for piece in tokens.split(pieces, dim=1):
            cache.extend([0, 1], piece.size(1))
            actual.append(model(piece, kv_cache=cache))
        torch.testing.assert_close(torch.cat(actual, dim=1), model(tokens), rtol=0, atol=1e-4)
    assert cache.lengths.tolist() == [sum(pieces)] * 2


def test_prompts_predict_from_their_last_tokens():
    model = small_gpt().eval()
    tokens = prompt(12)[0]
    cache = model.make_cache(3, page=16)
    for row, count in ((1, 8), (0, 4)):
        cache.allocate(row)
        cache.extend([row], count)
    with torch.no_grad():
        logits = model(tokens[None], kv_cache=cache.prompts([1, 0]))
        expected = torch.cat([model(part[None])[:, -1:] for part in (tokens[:8], tokens[8:])], dim=1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("page", [None, 16])
def test_a_call_without_its_room_is_refused(page):
    """In pages it would write into the first page of others."""
    model = small_gpt().eval()
    cache = model.make_cache(2, page=page)
    for row in range(2):
        cache.allocate(row)
    with torch.no_grad():
        with pytest.raises(
            ValueError, match="row 0 of the KV cache has room for 0 more tokens and the call adds 3; call extend"
        ):
            model(prompt(3, rows=2), kv_cache=cache)
        cache.extend([0, 1], 3)
        for _ in range(3):  # one by one, as they come
            model(prompt(1, rows=2), kv_cache=cache)
        cache.extend([0, 1], 1)
        with pytest.raises(ValueError, match="row 0 of the KV cache has room for 1 more tokens and the call adds 2"):
            model(prompt(2, rows=2), kv_cache=cache)
        model(prompt(1, rows=2), kv_cache=cache)
        with pytest.raises(ValueError, match="row 0 of the KV cache has room for 0 more tokens and the call adds 1"):
            model(prompt(1, rows=2), kv_cache=cache)
        cache.extend([0], 1)  # the other row would write where it has no room
        with pytest.raises(ValueError, match="row 1 of the KV cache has room for 0 more tokens and the call adds 1"):
            model(prompt(1, rows=2), kv_cache=cache)
        cache.extend([1], 1)
        model(prompt(1, rows=2), kv_cache=cache)
    for change in (cache.allocate, cache.free, lambda row: cache.extend([row], 1)):
        for row in (-1, 2):
            with pytest.raises(ValueError, match=f"has rows 0 to 1, and none of number {row}"):
                change(row)


def test_rows_that_come_one_by_one_leave_no_room_behind():
    model = small_gpt().eval()
    cache = model.make_cache(3, page=16)
    with torch.no_grad():
        for row in range(2):
            cache.allocate(row)
            cache.extend([row], 4)
        model(prompt(8), kv_cache=cache.prompts([0, 1]))
        cache.allocate(2)
        cache.extend([2], 5)
        cache.free(2)
        with pytest.raises(ValueError, match="row 0 of the KV cache has room for 0 more tokens and the call adds 1"):
            model(prompt(1, rows=3), kv_cache=cache)
    with pytest.raises(ValueError, match="row 0 of the KV cache has 4 tokens and room for 4; a prompt is read into"):
        cache.prompts([0])


def test_a_cache_holds_the_autocast_dtype():
    model = small_gpt().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model.make_cache(1)
        cache.allocate(0)
        cache.extend([0], 8)
        assert cache.keys.dtype == torch.bfloat16
        assert torch.isfinite(model(prompt(8), kv_cache=cache)).all()
    for dtype in (torch.int32, torch.uint8, torch.float8_e5m2, "int8"):
        with pytest.raises(ValueError, match=f"a KV cache in {dtype} "):
            model.make_cache(1, dtype=dtype)
    for max_tokens in (33, 0, -3):
        with pytest.raises(ValueError, match=f"max_tokens={max_tokens} must be from 1 to the model's seq_len=32"):
            model.make_cache(1, max_tokens)


def test_a_copy_for_inference_shares_what_it_can():
    model = small_gpt(dropout=0.5).train()
    same, half = model.for_inference(torch.float32), model.for_inference(torch.bfloat16)
    assert same.head.weight.data_ptr() == model.head.weight.data_ptr()
    assert half.head.weight.dtype == torch.bfloat16
    assert half.cos is model.cos
    assert model.training
    assert not same.training
    assert not half.blocks[0].mlp.training
    assert same.blocks[0] is not model.blocks[0]
    assert not same.head.weight.requires_grad
    assert model.head.weight.requires_grad
    assert same.for_inference(torch.float32) is same
    assert half.for_inference(torch.float32) is not half
    assert half.train().for_inference(torch.bfloat16) is not half


@pytest.mark.parametrize("changes", [{"mlp": "swiglu", "qk_norm": True}, {"mlp": "relu2"}, {"mlp": "gelu"}])
def test_a_block_s_few_launches_are_the_block(changes):
    block = small_gpt(**changes).eval().blocks[1]
    model = small_gpt(**changes).eval()
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for few in (True, False):
        cache = model.make_cache(3, page=16)
        for row, length in ((0, 7), (2, 4)):
            cache.allocate(row)
            cache.extend([row], length)
            cache.lengths[row] = cache.stored[row] = length
        cache.extend([0, 2], 1)
        tables = model.cos[[7, 0, 4]], model.sin[[7, 0, 4]]
        with torch.no_grad():
            if few and model.config.qk_norm:
                found.append(decode(block, x, *tables, None, cache))
            elif few:
                found.append(decode(block, x, model.cos, model.sin, cache.positions(3, 1), cache))
            else:
                found.append(block(x, *tables, cache))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "mlp": "swiglu"}, {"mlp": "relu2"}], ids=str)
def test_prompts_in_fewer_launches_are_the_block(changes):
    model = small_gpt(**changes).eval()
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(2))
    found = []
    for fused in (False, True):
        cache = model.make_cache(3, page=16)
        cache.allocate(2, 0)
        cache.extend([2, 0], [5, 7])
        prompts = cache.prompts([2, 0])
        tables = (table[prompts.positions(1, 12)] for table in (model.cos, model.sin))
        with torch.no_grad():
            if fused:
                found.append(prefill(model.blocks[1], x.clone(), *tables, None, prompts))
            else:
                found.append(model.blocks[1](x, *tables, prompts))
        found.append(cache.keys.clone())
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-4, atol=1e-4)


# ---- the choice of a token


def seeded(seed: int, rows: int = 1) -> torch.Tensor:
    """Uniform numbers, one a row."""
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=20)


@settings(max_examples=60)
@given(logit_rows, st.integers(1, 25), st.floats(0.01, 1.0), st.floats(0.1, 3.0), st.integers(0, 2**31))
def test_only_the_nucleus_of_the_top_k_is_drawn(values, top_k, top_p, temperature, seed):
    logits = torch.tensor(values)
    rows = logits.expand(64, -1)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = set(choose_next_token(rows, seeded(seed, 64), **options).tolist())

    # The definition, token by token: the likeliest k, then the fewest of them whose share reaches p.
    probs = (logits.double() / temperature).softmax(0)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top_k]
    total, share, kept = sum(probs[i].item() for i in order), 0.0, set()
    for i in order:
        if share >= top_p + 1e-9:  # a share that equals p to rounding may go either way
            break
        kept.add(i)
        share += probs[i].item() / total
    assert drawn <= kept


@settings(max_examples=30)
@given(logit_rows, st.integers(0, 2**31))
def test_extreme_options_are_greedy(values, seed):
    logits = torch.tensor(values)[None]
    best = logits.amax()
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}):
        token = choose_next_token(logits, seeded(seed), **options)
        assert logits[0, token] >= best - 1e-6, options  # logits closer than that draw like equal ones


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, [0, 1, 2, 3, 4]),
        (3, None, [1, 3, 4]),
        (None, 0.8, [1, 3, 4]),
        (3, 0.75, [1, 3]),  # of the three that top_k keeps, these two hold 76 %
    ],
)
def test_frequencies_follow_the_truncated_distribution(top_k, top_p, kept):
    probs = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)
    expected = torch.zeros_like(probs)
    expected[kept] = probs[kept]
    expected /= expected.sum()
    draws = 40_000
    tokens = choose_next_token(probs.log().float().expand(draws, -1), seeded(0, draws), top_k=top_k, top_p=top_p)
    actual = torch.bincount(tokens, minlength=5) / draws
    assert (actual - expected).abs().max() < 0.01  # four standard errors of a share of 0.4


def test_a_share_that_reaches_p_exactly_ends_the_nucleus():
    """And a number that is exactly the mass of the first tokens draws the next one."""
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.9999], dtype=torch.float64)
    logits = torch.zeros(4, 4)  # of which each has a share of exactly 0.25
    assert choose_next_token(logits, uniform).tolist() == [0, 1, 2, 3]
    assert choose_next_token(logits, uniform, top_p=0.5).tolist() == [0, 0, 1, 1]
    assert choose_next_token(logits, uniform.new_ones(4), top_p=0.7).tolist() == [2] * 4  # as float32 may round it


def test_numbers_drawn_on_the_host_serve_logits_of_a_gpu(monkeypatch):
    """As a model of transformers hands them over; `Generation` has them on the device already."""
    monkeypatch.setattr("model.sampling.draw_tokens", lambda logits, uniform, **options: uniform)
    with FakeTensorMode():
        logits = torch.empty(2, 50, device="cuda")
        token = choose_next_token(logits, torch.empty(2, dtype=torch.float64), top_k=5)
    assert token.device.type == "cuda"


def test_temperature_sharpens_and_flattens():
    logits = torch.tensor([1.0, 0.0]).expand(20_000, -1)
    for temperature in (0.5, 1.0, 2.0):
        share = 1 - choose_next_token(logits, seeded(0, 20_000), temperature=temperature).double().mean()
        assert abs(share - torch.tensor(1 / temperature).sigmoid()) < 0.015


@settings(max_examples=60)
@given(st.lists(st.sampled_from([-2.5, -0.0, 0.0, 1e-40, 1.5, 3.0]), min_size=2, max_size=30), st.integers(1, 30))
def test_equal_logits_come_in_the_order_of_their_ids(values, count):
    """On every device: a top-k of its own choice among equals would give other texts."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = torch.tensor(values).to(dtype)[None]
        found, ids = likeliest(logits, count)
        order = sorted(range(len(values)), key=lambda i: (-logits[0, i].item(), i))[:count]
        assert ids[0].tolist() == order
        assert found.dtype == torch.float64
        assert found[0].tolist() == [logits[0, i].item() for i in order]


def test_ids_of_more_than_16_bits_are_whole():
    logits = torch.zeros(1, 70_000, dtype=torch.bfloat16)
    logits[0, [69_999, 3, 66_000]] = 1.0
    assert likeliest(logits, 4)[1].tolist() == [[3, 66_000, 69_999, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number of at least 0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": None}, "prompts is None; give a list of prompts, each a list of ids"),
        ({"prompts": [1, 2]}, "prompt 0 is 1; give a list of prompts, each a list of ids"),
        ({"prompts": torch.tensor([1, 2])}, "prompt 0 is 1; give a list of prompts, each a list of ids"),
        ({"prompts": ["text"]}, "prompt 0 is 'text'; give a list of prompts, each a list of ids"),
        ({"cache_dtype": torch.int16}, "cache_dtype=torch.int16 must be None, torch.int8 or torch.float8_e4m3fn"),
        ({"top_k": 2.5}, "top_k=2.5 must be a whole number"),
        ({"top_k": True}, "top_k=True must be a whole number"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"top_p": "0.5"}, "top_p='0.5' must be a number"),
        ({"num_samples": True}, "num_samples=True must be a whole number"),
        ({"seed": None}, "seed=None must be a whole number of at least -9223372036854775808 and below 2\\^64"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be a whole number"),
        ({"stop_token": [1, 2]}, r"stop_token=\[1, 2\] must be a whole number"),
        ({"prompts": [[1.5, 2]]}, "prompt 0 is no list of ids"),
        ({"prompts": [[1], [2**70]]}, "prompt 1 is no list of ids"),
        ({"prompts": torch.ones(1, 2, 3, dtype=torch.int64)}, "prompt 0 is no list of ids"),
        ({"prompts": [[1], [0, VOCAB]]}, "an id of prompt 1 lies outside 0..64"),
        ({"prompts": [[1], [0, -1]]}, "an id of prompt 1 lies outside 0..64"),
    ],
)
def test_impossible_options_are_refused_at_the_call(options, message):
    arguments = {"prompts": [[1]], "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        generate(small_gpt(), **arguments)


@pytest.mark.parametrize("options", [{"seed": 2**64 - 1}, {"seed": -(2**63)}, {"stop_token": -1}], ids=str)
def test_extreme_options_are_accepted(options):
    assert len(text(small_gpt(), [1], max_new_tokens=2, **options)[0]) == 2


def test_a_prompt_may_be_longer_than_what_is_read_in_one_call(monkeypatch):
    monkeypatch.setattr("model.generation.PROMPT_TOKENS", 4)
    assert [len(tokens) for tokens in texts(small_gpt(), [[1] * 9, [2] * 9], max_new_tokens=1)] == [1, 1]


def test_of_two_doubles_the_larger_is_the_likelier():
    """Also where float32 rounds both to one number."""
    logits = torch.tensor([[0.0, 1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert likeliest(logits, 1)[1].tolist() == [[2]]


def test_a_model_without_numbers_is_refused_at_the_call():
    with pytest.raises(ValueError, match="the model is on meta, where weights have no numbers; make it on the device"):
        generate(small_gpt().to("meta"), [[1]], max_new_tokens=3)


def test_prompts_may_be_tensors_and_arrays_and_none_at_all():
    prompts = torch.tensor([[1, 2], [3, 4]])
    assert list(generate(small_gpt(), prompts[:0], max_new_tokens=3)) == []
    assert list(generate(small_gpt(), iter([[1, 2]]), max_new_tokens=0)) == []
    drawn = list(generate(small_gpt(), prompts, max_new_tokens=3))
    assert len(drawn) == 3  # steps of both
    arrays = [np.array([1, 2], dtype=np.uint16), torch.tensor([3, 4], dtype=torch.int32)]
    assert list(generate(small_gpt(), arrays, max_new_tokens=3)) == drawn


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_whole_numbers_of_other_kinds_are_whole_numbers(kind):
    options = {"max_new_tokens": 3, "num_samples": 2, "batch_size": 2, "seed": 5, "stop_token": 3}
    expected = list(generate(small_gpt(), [[1, 2]], top_k=4, **options))
    options = {name: kind(value) for name, value in options.items()}
    assert list(generate(small_gpt(), [[1, 2]], top_k=np.int64(4), **options)) == expected


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_the_bytes_of_a_prompt_are_its_ids(kind):
    ids = [1, 2, 0, 0, 0, 0, 0, 0]
    for count in (2, 8):
        given, expected = (list(generate(small_gpt(), [x], max_new_tokens=3)) for x in (kind(ids[:count]), ids[:count]))
        assert given == expected


def test_logits_that_are_no_numbers_choose_a_token_that_there_is():
    for row in ([float("nan")] * 4, [float("inf")] * 4):
        token = choose_next_token(torch.tensor([row]), torch.tensor([0.5], dtype=torch.float64))
        assert 0 <= token.item() < 4


# ---- the loop


def uncached(model: GPT, tokens: list[int], count: int, temperature: float = 0.0) -> list[int]:
    """`count` tokens of seed 0 by the definition: a whole forward for each."""
    uniform = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, first, length = list(tokens), max(0, len(tokens) - SEQ_LEN), len(tokens)  # `first`: of the context
    with torch.no_grad():
        for number in uniform:
            if len(tokens) - first > SEQ_LEN:
                first = len(tokens) - SEQ_LEN // 2
            context = torch.tensor([tokens[first:]], device=model.embedding.weight.device)
            tokens.append(choose_next_token(model(context)[0, -1:], number, temperature=temperature).item())
    return tokens[length:]


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_greedy_text_is_that_of_uncached_forwards(num_kv_heads):
    model = small_gpt(num_kv_heads=num_kv_heads).eval()
    expected = uncached(model, prompt(5)[0].tolist(), 20)
    assert text(model, prompt(5)[0], max_new_tokens=20, temperature=0.0) == [expected]
    assert len(set(expected)) > 2  # a text that repeats one token would prove little


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("length", [30, SEQ_LEN, 50])
def test_beyond_seq_len_the_last_half_is_read_again(length, temperature):
    model = small_gpt().eval()
    tokens = prompt(length)[0].tolist()
    expected = uncached(model, tokens, 40, temperature)
    assert text(model, tokens, max_new_tokens=40, temperature=temperature) == [expected]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.2, "top_k": 9, "seed": 5}])
def test_a_text_does_not_depend_on_who_is_continued_beside_it(options, batch_size, monkeypatch):
    """Seven prompts of all lengths, two samples each, that stop at different times, against one at a time."""
    model = small_gpt()
    monkeypatch.setattr("model.generation.PROMPT_TOKENS", 40)  # so that prompts are read in several calls
    prompts = [prompt(length)[0].tolist() for length in (1, 31, 7, 32, 2, 16, 40)]
    options |= {"max_new_tokens": 25, "num_samples": 2, "stop_token": 14}
    alone = [sample for one in prompts for sample in texts(model, [one], **options)]
    assert texts(model, prompts, batch_size=batch_size, **options) == alone
    assert len({len(one) for one in alone}) > 3  # they do stop at different times


def test_what_memory_does_not_hold_is_refused_and_what_waits_takes_none(monkeypatch):
    """Ten million samples filled it until the process was killed, before the first token."""
    monkeypatch.setattr("model.generation.free_host_bytes", lambda: 3 * 2**30)
    monkeypatch.setattr("model.cache.free_bytes", lambda device: 3 * 2**30)
    options = {"max_new_tokens": 1000, "num_samples": 10**7}
    said = (
        "num_samples=10000000 of max_new_tokens=1000 are drawn with 74.51 GiB of random numbers and 3.00 GiB are free"
    )
    with pytest.raises(ValueError, match=f"{said}; use fewer"):
        generate(small_gpt(), [[1]], **options)
    said = r"10000000 rows of 2 tokens, 10000000 pages of 128, needs \S+ GiB and 3.00 GiB are free on cpu; use fewer"
    with pytest.raises(ValueError, match=f"a KV cache of {said}"):
        generate(small_gpt().cpu(), [[1]], max_new_tokens=1, num_samples=10**7, batch_size=10**7)
    made = []
    real = Continuation
    monkeypatch.setattr("model.generation.Continuation", lambda *arguments: made.append(real(*arguments)) or made[-1])
    steps = generate(small_gpt(), [[1], [2]], max_new_tokens=1, num_samples=50, batch_size=3)
    assert [number for number, _ in next(steps)] == [0, 1, 2]
    assert len(made) < 9
    assert [number for step in steps for number, _ in step] == list(range(3, 100))


def test_rows_and_pages_are_all_given_back(monkeypatch):
    caches = []
    real = GPT.make_cache
    monkeypatch.setattr(GPT, "make_cache", lambda *arguments: caches.append(real(*arguments)) or caches[-1])
    texts(small_gpt(), [[1] * 20, [2], [3] * 9], max_new_tokens=30, num_samples=3, batch_size=4, stop_token=14)
    (cache,) = caches
    assert cache.reserved == [-1] * 4
    assert not any(cache.ref_counts)
    assert sorted(cache.free_pages) == list(range(len(cache.ref_counts)))


def test_samples_of_a_prompt_read_it_once(monkeypatch):
    read = []
    real = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, x, **o: read.append(x.numel()) or real(self, x, **o))
    texts(small_gpt(), [[1] * 20, [2] * 9], max_new_tokens=2, num_samples=3)
    assert read == [29, 6]


def test_the_seed_alone_decides_and_nothing_global_is_drawn():
    model = small_gpt(dropout=0.5).train()
    options = {"max_new_tokens": 12, "num_samples": 3, "temperature": 1.5}
    state = torch.get_rng_state()
    first = text(model, [1, 2, 3], seed=4, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(100)
    assert text(model, [1, 2, 3], seed=4, **options) == first
    assert text(model, [1, 2, 3], seed=5, **options) != first
    assert first[0] != first[1]  # samples side by side are different texts


def test_the_text_of_a_seed_stays_the_one_it_was():
    """Frozen when samples were drawn by one call of the generator a step."""
    model = small_gpt()
    drawn = text(model, [1, 2, 3], seed=4, max_new_tokens=8, num_samples=2, temperature=1.5, top_k=20)
    assert drawn == [[33, 33, 64, 45, 29, 30, 9, 57], [48, 3, 48, 0, 44, 1, 13, 16]]


def test_the_model_is_as_it_was_between_tokens():
    model = small_gpt().train()
    for step in generate(model, [[1]], max_new_tokens=3, num_samples=2):
        assert model.training
        assert model.blocks[0].mlp.training
        assert torch.is_grad_enabled()
        assert [sequence for sequence, _ in step] == [0, 1]


def test_an_interrupted_text_is_the_beginning_of_the_whole():
    model = small_gpt()
    whole = text(model, [1, 2], max_new_tokens=10, seed=3)[0]
    stream = generate(model, [[1, 2]], max_new_tokens=10, seed=3)
    assert [next(stream)[0][1] for _ in range(4)] == whole[:4]


def test_a_generation_begun_in_inference_mode_goes_on_outside():
    expected = list(generate(small_gpt(), [[1, 2]], max_new_tokens=4))
    for inside in (0, 2):
        with torch.inference_mode():
            steps = generate(small_gpt(), [[1, 2]], max_new_tokens=4)
            begun = [next(steps) for _ in range(inside)]
        assert begun + list(steps) == expected


@pytest.mark.parametrize("hooked", ["", "blocks.1", "blocks.0.attention", "blocks.1.mlp.up", "none"])
def test_what_a_hook_keeps_may_need_a_gradient(hooked, monkeypatch):
    """Without hooks the model is called in inference mode, whose tensors cannot have one."""
    model, kept = small_gpt().eval().requires_grad_(False), []
    monkeypatch.setattr("model.generation.flash", model.blocks[0].attention.attend)
    monkeypatch.setattr(
        "model.generation.choose_next_token", lambda logits, *_, **__: kept.append(logits) or logits.argmax(-1)
    )
    if hooked != "none":
        model.get_submodule(hooked).register_forward_hook(lambda module, inputs, output: kept.append(output))
    texts(model, [[1, 2, 3], [4, 5]], max_new_tokens=3)
    assert any(x.is_inference() for x in kept) == (hooked == "none")
    assert len(kept) == (3 if hooked == "none" else 6)


class Counter:
    """Counts calls; its lock cannot be copied."""

    def __init__(self):
        self.calls, self.lock = 0, Lock()

    def hook(self, *_):
        self.calls += 1

    def attend(self, attend, *tensors, **options):
        self.calls += 1
        return attend(*tensors, **options)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_copy_of_the_model_has_its_hooks_and_its_attention(frozen):
    model, seen = small_gpt().eval().requires_grad_(not frozen), [Counter() for _ in range(3)]
    model.blocks[0].register_forward_hook(seen[0].hook)
    model.blocks[1].mlp.register_forward_pre_hook(seen[1].hook)
    with attend_with(model, lambda layer, own: partial(seen[2].attend, own)):
        text(model, [1, 2], max_new_tokens=3)
    assert [counter.calls for counter in seen] == [3, 3, 6]


def test_hooks_of_training_need_not_be_copied():
    """One of a lock, say, cannot be."""
    model = small_gpt().eval()
    expected = text(model, [1, 2], max_new_tokens=2)
    for kind in ("full_backward", "full_backward_pre", "state_dict_post", "state_dict_pre"):
        getattr(model.blocks[0], f"register_{kind}_hook")(partial(print, Lock()))
    assert text(model, [1, 2], max_new_tokens=2) == expected


def test_a_part_in_training_mode_has_no_part_in_a_text():
    model = small_gpt(dropout=0.5).eval().requires_grad_(False)
    expected = text(model, [1, 2, 3], max_new_tokens=8, temperature=0.0)
    model.blocks[1].train()
    assert text(model, [1, 2, 3], max_new_tokens=8, temperature=0.0) == expected
    assert model.blocks[1].mlp.training
    assert not model.blocks[0].training


def test_the_weights_that_a_graph_reads_live_as_long_as_its_generation(monkeypatch):
    model = small_gpt().eval().requires_grad_(False)
    monkeypatch.setattr("model.generation.flash", model.blocks[0].attention.attend)
    generation = Generation(model, StepState.of(model, 1, 16, 16, None, None), likeliest, None, 1)
    before = generation._graph_key()
    weight = ref(model.blocks[0].mlp.up.weight)
    model.load_state_dict(small_gpt().state_dict(), assign=True)
    gc.collect()
    assert weight() is not None
    assert generation._graph_key() != before
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()], ids=repr)
def test_a_capture_that_fails_ends(error, monkeypatch):
    ends = []

    class Graph:
        def capture_begin(self, **_):
            assert not gc.isenabled()

        def capture_end(self):
            ends.append("end")
            raise RuntimeError("operation failed due to a previous error during capture")

    def fail():
        raise error

    stand_ins = {"Stream": lambda device: None, "stream": nullcontext, "CUDAGraph": Graph}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    model = small_gpt().for_inference(torch.float32)
    generation = Generation(model, StepState(model.make_cache(1, page=16), None), likeliest, None, 1)
    monkeypatch.setattr(generation, "_step", fail)
    with pytest.raises(type(error)):
        generation._captured()
    assert ends == ["end"]
    assert gc.isenabled()


def test_a_capture_without_room_is_made_once_more_without_what_is_cached(monkeypatch):
    asked, graph = [], SimpleNamespace(replay=lambda: asked.append("replay"))

    def captured():
        asked.append("capture")
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no room")
        return graph

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty"))
    model = small_gpt().for_inference(torch.float32)
    generation = Generation(model, StepState(model.make_cache(1, page=16), None), likeliest, None, 1)
    generation.uses_graphs, generation._captured = True, captured
    monkeypatch.setattr("model.generation.COMPILED", {generation.kind})
    generation.cache.allocate(0)
    generation._launch([0])
    assert asked == ["capture", "empty", "capture", "replay"]
    assert generation.state.graph is graph


def test_generation_does_not_ask_for_the_default_device():
    expected = list(generate(small_gpt(), [[1, 2], [3]], max_new_tokens=4))
    model = small_gpt()
    with torch.device("meta"):
        assert list(generate(model, [[1, 2], [3]], max_new_tokens=4)) == expected


def test_each_sample_stops_by_itself():
    model = small_gpt()
    options = {"max_new_tokens": 60, "num_samples": 3, "temperature": 3.0, "seed": 0}
    free = text(model, [1], **options)
    stop = free[0][5]
    stopped = text(model, [1], stop_token=stop, **options)
    for whole, part in zip(free, stopped, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 60
        assert part == whole[:end]
    assert len(stopped[0]) <= 6
    assert len({len(part) for part in stopped}) > 1


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}], ids=str)
def test_an_option_that_leaves_one_token_makes_the_greedy_text(options):
    model, asked = small_gpt(), {"max_new_tokens": 10, "seed": 3}
    greedy = text(model, [1], temperature=0.0, **asked)
    assert text(model, [1], **asked) != greedy
    assert text(model, [1], **asked, **options) == greedy


def test_no_tokens_asked_for_none_given():
    assert list(generate(small_gpt(), [[1]], max_new_tokens=0)) == []
    assert list(generate(small_gpt(), [], max_new_tokens=5)) == []


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_flash_generates_through_its_own_kernels(cache_dtype):
    """Prompts as packed documents and decode over pages, in 32 and in 8 bits, against whole forwards."""
    model = small_gpt(attention="flash", num_layers=1, n_embd=32, num_heads=2, num_kv_heads=1)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokens = [prompt(length)[0].tolist() for length in (5, 9)]
    found = texts(model, tokens, max_new_tokens=4, temperature=0.0, cache_dtype=cache_dtype)
    assert found == [uncached(model, one, 4) for one in tokens]


def test_streams_are_of_the_models_gpu(monkeypatch):
    """Where another one is current, its stream knows nothing of the tokens that are copied."""
    asked = []

    class Stream:
        def __init__(self, device=None):
            asked.append(device)

        def wait_stream(self, other):
            pass

        def record_event(self):
            pass

    class OnAGpu(torch.Tensor):
        def record_stream(self, stream):
            pass

    graph = SimpleNamespace(capture_begin=lambda **_: None, capture_end=lambda: None)
    stand_ins = {"Stream": Stream, "current_stream": Stream, "stream": nullcontext, "CUDAGraph": lambda: graph}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    model = small_gpt().for_inference(torch.float32)
    generation = Generation(model, StepState(model.make_cache(1, page=16), None), likeliest, None, 1)
    generation.device, generation.copy_stream = torch.device("cuda", 1), Stream(torch.device("cuda", 1))
    generation.state.copied = SimpleNamespace(record=lambda: None, wait=lambda stream: None)
    monkeypatch.setattr(generation, "_step", generation._wait_for_copy)
    generation._captured()
    generation._send(torch.zeros(1, dtype=torch.int64).as_subclass(OnAGpu), [None])
    assert len(asked) == 4
    assert set(asked) == {generation.device}


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_what_a_step_reads_and_writes_stays_where_it_is(cache_dtype, monkeypatch):
    """A CUDA graph repeats the step on the tensors of its capture, whoever has the rows by then."""
    places, steps = {}, []
    real = Generation._step

    def step(self):
        real(self)
        steps.append(len(steps))
        for part in (self.state, self.cache):
            for name, x in vars(part).items():
                if isinstance(x, torch.Tensor):
                    places.setdefault(name, set()).add(x.data_ptr())

    monkeypatch.setattr(Generation, "_step", step)
    options = {"max_new_tokens": 20, "num_samples": 2, "batch_size": 3, "temperature": 1.5}
    texts(small_gpt(), [[1] * 5, [2] * 20, [3]], cache_dtype=cache_dtype, **options)
    assert len(steps) > 30
    assert places.keys() >= {"uniform", "tokens", "sample", "drawn", "keys", "values", "lengths", "block_table"}
    assert {name: len(found) for name, found in places.items()} == dict.fromkeys(places, 1)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_a_state_at_rest_has_no_keys_and_makes_the_same_text_again(cache_dtype):
    model = small_gpt().for_inference(torch.float32)
    sizes = 3, 30, 16, cache_dtype
    options = {"temperature": 1.5, "top_k": 20}

    def drawn(model: GPT, state: StepState) -> list:
        choose = partial(choose_next_token, **options)
        generation = Generation(model, state, choose, None, 6)
        return [*generation.run(iter([Continuation(i, 0, array("q", [1, 2, i])) for i in range(5)]))]

    def numbers(seed: int) -> torch.Tensor:
        return seeded(seed, 6)[None]

    expected, others = (drawn(model, StepState.of(model, *sizes, numbers(seed))) for seed in (1, 2))
    state = StepState.of(model, *sizes, numbers(1))
    generation = Generation(model, state, partial(choose_next_token, **options), None, 6)
    begun = generation.run(iter([Continuation(0, 0, array("q", [5, 5]))]))
    next(begun)
    begun.close()
    state.rest(model)  # with a row in use
    assert IDLE[model] is state
    assert [stored.untyped_storage().nbytes() for stored in state._stored()] == [0] * len(state._stored())
    for changed in ((2, *sizes[1:]), (3, 16, *sizes[2:])):
        assert StepState.of(model, *changed, numbers(1)) is not state
        assert model not in IDLE  # one is kept, and this was it
        state.rest(model)
    again = StepState.of(model, 3, 25, *sizes[2:], numbers(1))
    assert again is state
    assert state.cache.max_tokens == 25
    assert not any(stored.any() for stored in (state.cache.keys, state.cache.values))
    assert all((scale == 1).all() for scale in state.cache.scales)
    assert drawn(model, state) == expected
    state.rest(model)
    assert drawn(model, StepState.of(model, *sizes, numbers(2))) == others != expected
    state.rest(model)
    assert StepState.of(model, *sizes, None) is not state
    state.rest(model)
    del model, generation, begun
    gc.collect()
    assert state not in IDLE.values()


class TestOnTheGpu:
    """GPT-2's shape with fewer layers, in bfloat16, as a CUDA graph."""

    pytestmark = pytest.mark.gpu
    PROMPTS, NEW = 100, 256

    @pytest.fixture(scope="class")
    def model(self) -> GPT:
        config = GPTConfig(num_layers=4, attention="flash", loss="chunked")
        model = GPT(config, 50257, 1024, device="cuda", generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        return model.for_inference(torch.bfloat16)

    @pytest.fixture(scope="class")
    def prompts(self) -> list[list[int]]:
        chance = torch.Generator().manual_seed(1)
        return [torch.randint(50257, (1 + 4 * i,), generator=chance).tolist() for i in range(self.PROMPTS)]

    @pytest.fixture(scope="class")
    def batched(self, model, prompts) -> list[list[int]]:
        return texts(model, prompts, max_new_tokens=self.NEW, temperature=0.0, batch_size=64)

    def explain(self, model: GPT, prompts, found: list[list[int]]) -> int:
        """Each token is the likeliest of an uncached forward over what precedes it, or as near to it as rounding is;
        returns how many are not the likeliest."""
        ties = 0
        for before, text_ in zip(prompts, found, strict=True):
            assert len(text_) == self.NEW
            with torch.no_grad():
                logits = model(torch.tensor([before + text_], device="cuda"))[0, len(before) - 1 : -1].float()
            drawn = logits.gather(1, torch.tensor(text_, device="cuda")[:, None])[:, 0]
            gap = logits.amax(1) - drawn
            ties += int((gap > 0).sum())
            assert (gap <= 2**-5 * logits.abs().amax(1)).all(), (gap / logits.abs().amax(1)).max()
        return ties

    def test_what_stands_in_for_flash_asks_the_host_and_is_no_graph(self, model):
        """As in parity's and replay's runs, which print samples."""
        with attend_with(model, lambda layer, named: lambda *qkv, **options: named(*qkv, **options)):
            (found,) = texts(model, [[1, 2, 3]], max_new_tokens=8, temperature=0.0)
        assert len(found) == 8

    def test_uncached_cached_batched_and_paged_texts_are_one(self, model, prompts, batched):
        """Texts may part where two logits are as near as roundings of bfloat16, of which there are some a layer."""
        allowed = 0.02 * self.PROMPTS * self.NEW
        assert self.explain(model, prompts, batched) < allowed
        assert len({tuple(one) for one in batched}) == self.PROMPTS
        alone = [texts(model, [one], max_new_tokens=self.NEW, temperature=0.0)[0] for one in prompts[::10]]
        assert self.explain(model, prompts[::10], alone) < allowed / 10
        others = texts(model, prompts[::-1], max_new_tokens=self.NEW, temperature=0.0, batch_size=7)
        assert self.explain(model, prompts, others[::-1]) < allowed
        cache = model.make_cache(self.PROMPTS)  # contiguous, by hand
        for row, one in enumerate(prompts):
            cache.allocate(row)
            cache.extend([row], len(one))
        packed = torch.tensor([[token for one in prompts for token in one]], device="cuda")
        with torch.no_grad():
            steps = [model(packed, kv_cache=cache.prompts(list(range(self.PROMPTS))))[0].argmax(-1)]
            for _ in range(self.NEW - 1):
                cache.extend(list(range(self.PROMPTS)), 1)
                steps.append(model(steps[-1][:, None], kv_cache=cache)[:, 0].argmax(-1))
        by_hand = torch.stack(steps, 1).tolist()
        assert self.explain(model, prompts, by_hand) < allowed

    def test_a_step_copies_its_tokens_to_the_host_and_nothing_else(self, model, prompts):
        options = {"max_new_tokens": 40, "temperature": 0.8, "top_k": 50}
        stream = generate(model, prompts[:8], **options)
        for _ in range(4):
            next(stream)
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            for _ in range(20):
                next(stream)
        count = {event.key: event.count for event in profile.key_averages()}
        assert sum(n for name, n in count.items() if "DtoH" in name) == 20
        assert count.get("cudaStreamSynchronize", 0) == 0
        assert count["cudaGraphLaunch"] == 20

    def test_prompts_are_read_without_a_wait_for_the_gpu(self, model, prompts):
        """The host is ahead of it until it needs the first tokens."""
        options = {"max_new_tokens": 4, "temperature": 0.8, "top_k": 50, "num_samples": 2, "batch_size": 6}
        expected = texts(model, prompts[4:8], **options)
        texts(model, prompts[4:8], **options)  # captured
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert texts(model, prompts[4:8], **options) == expected
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_texts_drawn_by_graphs_are_those_drawn_without(self, model, prompts, monkeypatch):
        """Rows are handed on to other samples, whose draws are their own."""
        options = {"max_new_tokens": 40, "temperature": 0.8, "top_k": 50, "num_samples": 2, "batch_size": 5}
        found = texts(model, prompts[20:27], **options)
        monkeypatch.setattr("model.generation.needs_dispatcher", lambda *tensors: True)  # takes no graphs
        assert texts(model, prompts[20:27], **options) == found
        assert len(set(map(tuple, found))) == 14

    def test_tokens_arrive_however_late_they_are_copied(self, model, prompts, monkeypatch):
        """The next step, which begins meanwhile, writes its own where they are."""
        options = {"max_new_tokens": 12, "temperature": 0.0}
        found, send = texts(model, prompts[:8], **options), Generation._send

        def late(self, *arguments):
            with torch.cuda.stream(self.copy_stream):
                torch.cuda._sleep(10**7)  # cycles of the GPU: some steps
            return send(self, *arguments)

        monkeypatch.setattr(Generation, "_send", late)
        assert texts(model, prompts[:8], **options) == found

    def test_a_step_runs_once_before_it_is_captured_and_then_never_more(self, model, prompts, monkeypatch):
        """Triton compiles in the first one of a process, which no capture may."""
        launched, step = [], Generation._step
        monkeypatch.setattr(
            Generation, "_step", lambda self: launched.append(torch.cuda.is_current_stream_capturing()) or step(self)
        )
        monkeypatch.setattr("model.generation.COMPILED", set())
        for _ in range(2):
            texts(model, prompts[:3], max_new_tokens=10, temperature=0.0)
            IDLE.clear()  # what was captured is forgotten
        assert launched == [False, True, True]
        texts(model, prompts[:4], max_new_tokens=3, temperature=0.0)  # of other sizes
        with attend_with(model, lambda layer, named: lambda *qkv, **options: named(*qkv, **options)):
            texts(model, prompts[:5], max_new_tokens=3, temperature=0.0)  # no kernel of these is compiled by those
        texts(model, prompts[:5], max_new_tokens=3, temperature=0.0)
        assert launched[3:] == [False, True, False, False, False, True]

    def test_a_graph_is_kept_for_the_next_call_and_taken_where_it_is_still_right(self, model, prompts, monkeypatch):
        captured, capture = [], Generation._captured
        monkeypatch.setattr(Generation, "_captured", lambda self: captured.append(1) or capture(self))
        options = {"max_new_tokens": 30, "temperature": 0.8, "top_k": 50}

        def found(one: GPT, captures: int, **changes) -> list[list[int]]:
            captured.clear()
            text_ = texts(one, prompts[10:14], **(options | changes))
            assert len(captured) == captures
            return text_

        def fresh(one: GPT, **changes) -> list[list[int]]:
            with monkeypatch.context() as without:
                without.setattr("model.generation.needs_dispatcher", lambda *tensors: True)  # takes no graphs
                IDLE.clear()
                return texts(one, prompts[10:14], **(options | changes))

        mine = copy.deepcopy(model)
        expected, others = fresh(mine), fresh(mine, seed=1)
        texts(mine, prompts[10:14], **options)  # compiled
        assert found(mine, 1 if mine not in IDLE else 0) == expected
        before = torch.cuda.memory_allocated()
        assert found(mine, 0) == expected
        assert torch.cuda.memory_allocated() <= before
        assert found(mine, 0, seed=1) == others
        begun = generate(mine, prompts[10:14], **options)
        for _ in range(5):
            next(begun)
        begun.close()
        assert found(mine, 0) == expected
        with torch.no_grad():
            mine.blocks[0].mlp.up.weight.mul_(1.1)  # where it was
        changed = found(mine, 0)
        assert changed == fresh(mine) != expected
        texts(mine, prompts[10:14], **options)
        mine.blocks[1].mlp.up.weight.data = mine.blocks[1].mlp.up.weight.data * 0.9  # elsewhere
        assert found(mine, 1) == fresh(mine) != changed
        texts(mine, prompts[10:14], **options)
        mine.blocks[2].attention.window = (3, -1)
        assert found(mine, 1) == fresh(mine)
        texts(mine, prompts[10:14], **options)
        state = IDLE[mine]
        size = state.cache.keys.numel() * state.cache.keys.element_size()
        in_the_way = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(4)]
        assert found(mine, 0) == fresh(mine)
        del in_the_way

    def test_the_memory_of_a_state_at_rest_is_there_for_who_would_fail_without(self, model, prompts, monkeypatch):
        captured, capture = [], Generation._captured
        monkeypatch.setattr(Generation, "_captured", lambda self: captured.append(1) or capture(self))
        options = {"max_new_tokens": 10, "temperature": 0.0}
        mine = copy.deepcopy(model)
        expected = texts(mine, prompts[:4], **options)
        texts(mine, prompts[:4], **options)
        captured.clear()
        keys, taken = IDLE[mine].cache.keys, []
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            while True:
                taken.append(torch.empty(keys.shape, dtype=keys.dtype, device="cuda"))
        except torch.OutOfMemoryError:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert len(taken) >= 2  # keys' and values'
        assert texts(mine, prompts[:4], **options) == expected
        assert captured == [1]

    def test_another_gpu_may_be_current(self, model, prompts):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two NVIDIA GPUs")
        options = {"max_new_tokens": 40, "temperature": 0.8, "top_k": 50}
        usual = texts(model, prompts[:8], **options)
        with torch.cuda.device(1):
            assert texts(model, prompts[:8], **options) == usual

    @pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
    def test_eight_bits_keep_most_of_a_text(self, model, prompts, batched, cache_dtype):
        found = texts(
            model, prompts[:20], max_new_tokens=self.NEW, temperature=0.0, batch_size=20, cache_dtype=cache_dtype
        )
        first = [a[:8] == b[:8] for a, b in zip(batched, found, strict=False)]
        assert sum(first) >= 10


def test_a_context_of_one_token_goes_on_from_the_last_one():
    model = GPT(small_gpt().config, VOCAB, 1, generator=torch.Generator().manual_seed(0)).eval()
    assert len(text(model, [3], max_new_tokens=4, temperature=0.0)[0]) == 4


def test_what_a_stopped_sequence_has_drawn_since_is_not_handed_over():
    """On a GPU a step is launched before the host has seen the stop token of the one before."""
    sequence, at_work = Continuation(0, 0, None), SimpleNamespace(stop_token=7, row_sequences=[])
    steps = [Step([sequence], torch.tensor([token]), None) for token in (5, 7, 9)]
    assert [Generation._arrived(at_work, step) for step in steps] == [[(0, 5)], [(0, 7)], []]
