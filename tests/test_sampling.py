"""Generation: the KV cache against an uncached forward, the choice of a token, and the loop around it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT, GPTConfig, KVCache, generate
from model.sampling import choose_next_token

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


def text(model: GPT, tokens, **options) -> torch.Tensor:
    """All of a generation at once, (num_samples, tokens)."""
    return torch.stack(list(generate(model, tokens, **options)), dim=1)


# ---- KV cache


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", [[32], [10, 1, 1, 20], [1] * 6])
def test_cached_logits_are_the_uncached_ones(num_kv_heads, pieces):
    model = small_gpt(num_kv_heads=num_kv_heads, qk_norm=True).eval()
    tokens = prompt(sum(pieces), rows=2)
    cache = model.make_cache(batch_size=2)
    with torch.no_grad():
        expected = model(tokens)
        actual = torch.cat([model(piece, kv_cache=cache) for piece in tokens.split(pieces, dim=1)], dim=1)
    assert cache.length == sum(pieces)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_a_reset_cache_is_a_new_one():
    model = small_gpt().eval()
    tokens = prompt(8, rows=2)
    cache = model.make_cache(batch_size=2)
    with torch.no_grad():
        model(tokens.flip(1), kv_cache=cache)
        cache.reset()
        assert torch.equal(model(tokens, kv_cache=cache), model(tokens))


def test_a_cache_refuses_what_does_not_fit():
    cache = KVCache(num_layers=1, batch_size=1, num_kv_heads=2, max_tokens=4, head_dim=16)
    k = torch.zeros(1, 2, 3, 16)
    cache.append(0, k, k)
    cache.advance(3)
    with pytest.raises(ValueError, match="room for 4 tokens and would hold 6"):
        cache.append(0, k, k)
    cache.reset()
    with pytest.raises(ValueError, match=r"float32 and was given 1 in torch.bfloat16"):
        cache.append(0, k.bfloat16(), k.bfloat16())
    with pytest.raises(ValueError, match="holds 1 sequences"):
        cache.append(0, k.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1))


def test_a_cache_holds_the_autocast_dtype():
    model = small_gpt().eval()
    tokens = prompt(8, rows=2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model.make_cache(batch_size=2)
        assert cache.keys.dtype == torch.bfloat16
        assert torch.isfinite(model(tokens, kv_cache=cache)).all()


# ---- the choice of a token


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=20)


@settings(max_examples=60, deadline=None)
@given(logit_rows, st.integers(1, 25), st.floats(0.01, 1.0), st.floats(0.1, 3.0), st.integers(0, 2**31))
def test_only_the_nucleus_of_the_top_k_is_drawn(values, top_k, top_p, temperature, seed):
    logits = torch.tensor(values)
    rows = logits.expand(64, -1)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = set(choose_next_token(rows, seeded(seed), **options).tolist())

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


@settings(max_examples=30, deadline=None)
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
    tokens = choose_next_token(probs.log().expand(draws, -1), seeded(0), top_k=top_k, top_p=top_p)
    actual = torch.bincount(tokens, minlength=5) / draws
    assert (actual - expected).abs().max() < 0.01  # four standard errors of a share of 0.4


def test_temperature_sharpens_and_flattens():
    logits = torch.tensor([1.0, 0.0]).expand(20_000, -1)
    for temperature in (0.5, 1.0, 2.0):
        share = 1 - choose_next_token(logits, seeded(0), temperature=temperature).double().mean()
        assert abs(share - torch.tensor(1 / temperature).sigmoid()) < 0.015


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"prompt_tokens": []}, "at least one token"),
        ({"prompt_tokens": [VOCAB]}, "outside 0..64"),
    ],
)
def test_impossible_options_are_refused_at_the_call(options, message):
    arguments = {"prompt_tokens": [1], "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message):
        generate(small_gpt(), **arguments)


# ---- the loop


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_greedy_text_is_that_of_uncached_forwards(num_kv_heads):
    model = small_gpt(num_kv_heads=num_kv_heads).eval()
    expected = prompt(5)
    with torch.no_grad():
        for _ in range(20):
            expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(text(model, prompt(5)[0], max_new_tokens=20, temperature=0.0), expected[:, 5:])
    assert expected[0, 5:].unique().numel() > 2  # a text that repeats one token would prove little


def test_beyond_seq_len_the_last_half_is_read_again():
    model = small_gpt().eval()
    actual = text(model, prompt(30)[0], max_new_tokens=40, temperature=0.0)[0].tolist()
    tokens, first = prompt(30)[0].tolist(), 0  # `first`: where the context begins
    with torch.no_grad():
        for _ in range(40):
            if len(tokens) - first > SEQ_LEN:
                first = len(tokens) - SEQ_LEN // 2
            tokens.append(model(torch.tensor([tokens[first:]]))[0, -1].argmax().item())
    assert actual == tokens[30:]


def test_of_a_long_prompt_the_end_counts():
    model = small_gpt()
    long = prompt(50)[0]
    assert torch.equal(text(model, long, max_new_tokens=5), text(model, long[-SEQ_LEN:], max_new_tokens=5))


def test_a_prompt_read_by_pieces_gives_the_same_text(monkeypatch):
    model = small_gpt()
    expected = text(model, prompt(20)[0], max_new_tokens=10, temperature=0.0)
    monkeypatch.setattr("model.sampling.PREFILL_TOKENS", 7)
    assert torch.equal(text(model, prompt(20)[0], max_new_tokens=10, temperature=0.0), expected)


def test_the_seed_alone_decides_and_nothing_global_is_drawn():
    model = small_gpt(dropout=0.5).train()
    options = {"max_new_tokens": 12, "num_samples": 3, "temperature": 1.5}
    state = torch.get_rng_state()
    first = text(model, [1, 2, 3], seed=4, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(100)
    assert torch.equal(text(model, [1, 2, 3], seed=4, **options), first)
    assert not torch.equal(text(model, [1, 2, 3], seed=5, **options), first)
    assert not torch.equal(first[0], first[1])  # samples side by side are different texts


def test_the_model_is_as_it_was_between_tokens():
    model = small_gpt().train()
    for token in generate(model, [1], max_new_tokens=3, num_samples=2):
        assert model.training
        assert model.blocks[0].mlp.training
        assert torch.is_grad_enabled()
        assert token.shape == (2,)
        assert token.dtype == torch.int64
        assert not token.requires_grad


def test_an_interrupted_text_is_the_beginning_of_the_whole():
    model = small_gpt()
    whole = text(model, [1, 2], max_new_tokens=10, seed=3)
    stream = generate(model, [1, 2], max_new_tokens=10, seed=3)
    beginning = [next(stream).item() for _ in range(4)]
    assert beginning == whole[0, :4].tolist()


def test_each_sample_stops_by_itself():
    model = small_gpt()
    options = {"max_new_tokens": 60, "num_samples": 3, "temperature": 3.0, "seed": 0}
    free = text(model, [1], **options)
    stop = free[0, 5].item()
    stopped = text(model, [1], stop_token=stop, **options)
    ends = []
    for row in stopped:
        hits = (row == stop).nonzero()
        end = hits[0].item() if len(hits) else len(row)
        assert (row[end:] == stop).all()
        ends.append(end)
    assert ends[0] <= 5
    assert len(set(ends)) > 1
    assert stopped.size(1) == min(max(ends) + 1, 60)  # over as soon as the last one is


def test_no_tokens_asked_for_none_given():
    assert list(generate(small_gpt(), [1], max_new_tokens=0)) == []
