"""The loss kernels against PyTorch's cross-entropy in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.fused.cross_entropy import cross_entropy, cross_entropy_fwd
from kernels.fused.linear_cross_entropy import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    # rows, columns, vocab_size, what is special
    (7, 64, 50, "padding"),
    (5, 257, 257, "odd"),
    (3, 4160, 4097, "a whole block and a tail of one"),
    (2, 8192, 8192, "whole blocks only"),
    (4, 128, 100, "offset"),
    (4, 128, 100, "outlier"),
    (4, 128, 100, "minus infinity"),
    (4, 128, 100, "rows apart"),
]


def make(rows, columns, vocab_size, special, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab_size, (rows,), generator=generator)
    targets[rows // 2] = -1
    logits[:, vocab_size:] = 1e4  # padding must not be seen
    if special == "offset":
        logits[:, :vocab_size] += 1e3
    elif special == "outlier":
        logits[0, 3] = 1e4
    elif special == "minus infinity":
        logits[0, :40] = -float("inf")
        targets[0] = 41
    logits = logits.to(dtype).to(DEVICE)
    if special == "rows apart":
        logits = torch.cat((logits, logits), dim=1)[:, :columns]
    return logits.requires_grad_(), targets.to(DEVICE)


def losses(logits, targets, vocab_size):
    return cross_entropy_fwd(logits, targets, vocab_size)[0].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=[c[3] for c in CASES])
def test_agrees_with_float64(case, dtype, poisoned_memory):
    logits, targets = make(*case, dtype)
    vocab_size = case[2]
    loss = losses(logits, targets, vocab_size)
    loss.backward(torch.tensor(0.5, device=DEVICE))
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[:, :vocab_size], targets, ignore_index=-1, reduction="sum")
    expected.backward(torch.tensor(0.5, dtype=torch.float64, device=DEVICE))
    # absolute error of an fp32 log-sum-exp grows with the scores
    torch.testing.assert_close(
        loss.double(), expected, rtol=1e-6, atol=1e-6 * logits[:, :vocab_size].abs().nan_to_num(posinf=0).max().item()
    )
    assert logits.grad.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-3 if case[3] in ("offset", "outlier") else 1e-5
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rounding, atol=1e-7)
    assert (logits.grad[:, vocab_size:] == 0).all()
    assert (logits.grad[targets == -1] == 0).all()


def test_a_target_outside_the_vocabulary_is_not_hidden():
    logits, targets = make(4, 128, 100, "", torch.float32)
    targets[0] = 100
    assert losses(logits, targets, 100).isnan()


def test_any_negative_target_does_not_count():
    """-1 in a GPT of ours, -100 in what Hugging Face's collators make."""
    logits, targets = torch.randn(4, 5, device=DEVICE), torch.tensor([2, -1, 3, -100], device=DEVICE)
    weight, h = torch.randn(5, 8, device=DEVICE), torch.randn(4, 8, device=DEVICE)
    near = {"rtol": 5e-3, "atol": 5e-3}  # a row more would be off by 1
    torch.testing.assert_close(cross_entropy(logits, targets, 5), cross_entropy(logits[::2], targets[::2], 5), **near)
    found = linear_cross_entropy(h, weight, targets, 5)
    alone = linear_cross_entropy(h[::2].contiguous(), weight, targets[::2].contiguous(), 5)
    torch.testing.assert_close(found, alone, **near)


def test_a_row_without_a_target_is_refused():
    with pytest.raises(ValueError, match=r"targets has shape \(3,\); expected \(4,\), one of each row"):
        cross_entropy(torch.zeros(4, 5, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE), 5)


def test_what_lies_elsewhere_or_is_no_matrix_is_refused():
    """A table on meta gave a loss of whatever was in memory."""
    h, table, targets = torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="weight is on meta but h is on cpu; move them to one device"):
        linear_cross_entropy(h, table.to("meta"), targets, 5)
    with pytest.raises(ValueError, match="targets is on cpu but the rows are on meta; move them to one device"):
        cross_entropy(torch.zeros(4, 5, device="meta"), targets, 5)
    with pytest.raises(ValueError, match=r"logits has shape \(4,\); expected \(tokens, columns\)"):
        cross_entropy(torch.zeros(4), targets, 5)
    with pytest.raises(ValueError, match=r"h has shape \(4, 8\) and weight \(\); expected"):
        linear_cross_entropy(h, torch.zeros(()), targets, 5)


def test_operator_is_well_formed():
    logits, targets = make(4, 128, 100, "", torch.float32)
    torch.library.opcheck(cross_entropy_fwd, (logits, targets, 100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_public_function_agrees_with_the_operator(dtype):
    logits, targets = make(7, 64, 50, "padding", dtype)
    torch.testing.assert_close(cross_entropy(logits, targets, 50), losses(logits, targets, 50))


def test_targets_of_any_stride():
    logits, targets = make(7, 64, 50, "padding", torch.float32)
    apart = torch.stack((targets, targets + 1), 1)[:, 0]
    found, expected = (torch.autograd.grad(losses(logits, x, 50), logits)[0] for x in (apart, targets))
    assert torch.equal(found, expected)
    assert torch.equal(losses(logits, apart, 50), losses(logits, targets, 50))


@pytest.mark.gpu
def test_gpt2_vocabulary_past_two_gigaelements():
    """45,000 rows of 50,304 columns: offsets beyond 2^31; the last rows against PyTorch."""
    logits = torch.randn(45_000, 50_304, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(50_257, (45_000,), device="cuda")
    loss, _ = cross_entropy_fwd(logits, targets, 50_257)
    loss.sum().backward()
    tail = logits.detach()[-64:, :50_257].double().requires_grad_()
    expected = F.cross_entropy(tail, targets[-64:], reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss[-64:].double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits.grad[-64:, :50_257].double(), tail.grad, rtol=2**-8, atol=1e-7)
