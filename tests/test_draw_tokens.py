"""The drawn token of each row against the definition, `choose_next_token` on a CPU."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kernels import draw_tokens
from model.sampling import choose_next_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (5, 65, 5000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = (
    {"top_k": 40},
    {"top_k": 7, "top_p": 0.61234},
    {"top_k": 1},
    {},
    {"top_p": 0.71234, "temperature": 0.8},
    {"top_p": 1.0},
    {"top_k": 1000, "temperature": 3.7},
    {"top_k": 1000, "top_p": 0.91234},
    {"temperature": 1e-30},
)


def rows_of(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of every kind: spread, near each other, many equal ones, with a third that is impossible, all equal."""
    drawn = torch.Generator().manual_seed(vocab_size)
    rows = torch.randn(10, vocab_size, generator=drawn) * torch.tensor([1.0, 9.0, 0.01, 3.0, 5.0]).repeat(2)[:, None]
    rows[3:5] = rows[3:5].round()
    rows[5:7, ::3] = -float("inf")
    rows[7, 1::2] *= -0.0
    rows[9] = 0.5
    return rows.to(dtype)


def check(logits: torch.Tensor, draws: int, **options) -> None:
    logits = logits.repeat_interleave(draws, 0)
    uniform = torch.rand(len(logits), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[:: 2 * draws], uniform[draws :: 2 * draws] = 0.0, 0.99999
    options["top_k"] = options.get("top_k") and min(options["top_k"], logits.size(1))
    expected = choose_next_token(logits, uniform, **options)
    padded = torch.nn.functional.pad(logits, (0, 3), value=float("nan")).to(DEVICE)[:, :-3]  # as a padded head's are
    assert draw_tokens(padded, uniform.to(DEVICE), **options).tolist() == expected.tolist()


CASES = [  # in the interpreter a Latin square: each options with each dtype and with each size
    pytest.param(size, dtype, options, marks=() if (i + j + k) % 3 == 0 else pytest.mark.gpu)
    for i, size in enumerate(SIZES)
    for j, dtype in enumerate(DTYPES)
    for k, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(("vocab_size", "dtype", "options"), CASES, ids=str)
def test_the_token_is_that_of_the_definition(vocab_size, dtype, options):
    check(rows_of(vocab_size, dtype), 2 if vocab_size == 5000 else 4, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_at_temperature_0_it_is_the_first_of_the_largest(vocab_size, dtype):
    logits = rows_of(vocab_size, dtype)
    logits[8, -1] = logits[8].amax()  # twice, or the last
    padded = torch.nn.functional.pad(logits, (0, 3), value=float("inf")).to(DEVICE)[:, :-3]
    largest = logits == logits.amax(1, keepdim=True)
    expected = largest.long().argmax(1).tolist()  # of booleans as integers PyTorch's is the first on a CPU
    for uniform in (None, torch.rand(10, dtype=torch.float64, device=DEVICE)):
        assert draw_tokens(padded, uniform, temperature=0).tolist() == expected
    nothing = torch.full((1, 5), -float("inf"), device=DEVICE)
    assert draw_tokens(nothing, None, temperature=0).tolist() == [0]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3}, {}], ids=str)
def test_ids_are_written_to_a_tensor_that_is_given(options):
    logits, uniform = rows_of(65, torch.float32).to(DEVICE), torch.rand(10, dtype=torch.float64, device=DEVICE)
    given = torch.full((10,), -1, device=DEVICE)
    assert draw_tokens(logits, uniform, **options, out=given) is given
    assert torch.equal(given, draw_tokens(logits, uniform, **options))
    for wrong, said in (
        (given.int(), r"out has shape \(10,\) and dtype torch.int32 on .*; expected \(10,\) int64 on"),
        (given[:9], r"out has shape \(9,\)"),
        (given.repeat(2)[::2], r"out has strides \(2,\); expected a contiguous tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            draw_tokens(logits, uniform, **options, out=wrong)


@pytest.mark.parametrize("top_k", [2, 40, None])
def test_more_equal_logits_than_slots(top_k):
    """The smallest ids of them are kept, whatever group they are in."""
    logits = torch.zeros(1, 4500)
    logits[0, [17, 2100, 4400]] = 1.0
    for row in (logits, -logits, logits - logits):
        check(row, 12, top_k=top_k)


def test_numbers_of_numpy_and_torch_and_strides_are_taken():
    logits, uniform = rows_of(65, torch.float32), torch.rand(20, dtype=torch.float64)[::2]
    options = {"temperature": torch.tensor(2.0), "top_k": np.int64(7), "top_p": np.float32(0.7)}
    expected = choose_next_token(logits, uniform, temperature=2.0, top_k=7, top_p=float(np.float32(0.7)))
    strided = logits.T.contiguous().T.to(DEVICE)
    assert draw_tokens(strided, uniform.to(DEVICE), **options).tolist() == expected.tolist()


def test_a_share_that_reaches_p_exactly_ends_the_nucleus():
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.9999], dtype=torch.float64, device=DEVICE)
    logits = torch.zeros(4, 4, device=DEVICE)
    for top_k in (4, None):
        assert draw_tokens(logits, uniform, top_k=top_k).tolist() == [0, 1, 2, 3]
        assert draw_tokens(logits, uniform, top_k=top_k, top_p=0.5).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("top_k", [8, None])
def test_the_largest_number_draws_the_last_token(top_k):
    """Times the total it rounds to the total itself."""
    logits = torch.tensor([[0.0, 1.0, -float("inf")] * 3], device=DEVICE)
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64, device=DEVICE)
    assert draw_tokens(logits, uniform, top_k=top_k).item() == 6
    assert draw_tokens(logits, uniform, top_k=top_k, top_p=0.1).item() == 1


@pytest.mark.parametrize("top_k", [2, None])
def test_logits_that_are_no_numbers_draw_an_id_that_there_is(top_k):
    uniform = torch.tensor([0.5], dtype=torch.float64, device=DEVICE)
    for value in ("nan", "inf", "-inf"):
        logits = torch.full((1, 5), float(value), device=DEVICE)
        assert 0 <= draw_tokens(logits, uniform, top_k=top_k, top_p=0.5).item() < 5
    assert draw_tokens(logits[:0], uniform[:0]).shape == (0,)


def test_ids_that_autograd_keeps_are_not_written_over_in_silence():
    embedding, ids = torch.nn.Embedding(4, 3, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    total = embedding(ids).sum()
    draw_tokens(torch.tensor([[0.0, 9.0, 0.0]] * 2, device=DEVICE), None, temperature=0, out=ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_what_is_refused():
    logits, uniform = torch.zeros(2, 5), torch.zeros(2, dtype=torch.float64)
    for given, message in (
        ((logits, uniform[:1]), r"logits has shape \(2, 5\) on cpu and uniform \(1,\) of torch.float64"),
        ((logits, uniform.float()), r"uniform \(2,\) of torch.float32 on cpu; expected \(S, V\) and \(S,\) float64"),
        ((logits[0], uniform), r"logits has shape \(5,\)"),
        ((logits.double(), uniform), "logits are torch.float64 on cpu; expected bf16, fp16 or fp32 on CUDA"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_tokens(*given)
    logits, uniform = logits.to(DEVICE), uniform.to(DEVICE)
    for top_k in (0, 6, 2.7):
        with pytest.raises(ValueError, match=f"top_k={top_k} must be a whole number, 1 to the 5 logits of a row"):
            draw_tokens(logits, uniform, top_k=top_k)
    for name, values in (("temperature", (-1, math.nan, math.inf)), ("top_p", (0, -1, 2, math.nan))):
        for value in values:
            with pytest.raises(ValueError, match=f"{name}={value} must be"):
                draw_tokens(logits, uniform, **{name: value})
    with pytest.raises(ValueError, match=r"uniform has type list; expected a torch\.Tensor"):
        draw_tokens(logits, [0.1, 0.2])
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"not for torch\.compile, torch\.func or fake"):
        draw_tokens(mode.from_tensor(logits), None, temperature=0)
    with pytest.raises(RuntimeError, match=r"not for torch\.compile, torch\.func or fake"):
        torch.vmap(lambda x: draw_tokens(x, None, temperature=0))(logits[None])
    with FlopCounterMode(display=False):  # which only counts
        assert draw_tokens(logits, None, temperature=0).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"logits has shape \(2, 0\)"):
        draw_tokens(logits[:, :0], None, temperature=0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_vocabulary_on_the_gpu(dtype, options):
    check(rows_of(50257, dtype), 6, **options)


@pytest.mark.gpu
def test_generation_draws_with_it():
    logits, uniform = rows_of(70_000, torch.bfloat16), torch.rand(10, dtype=torch.float64)
    for options in OPTIONS:
        assert (
            choose_next_token(logits.cuda(), uniform, **options).tolist()
            == choose_next_token(logits, uniform, **options).tolist()
        )
