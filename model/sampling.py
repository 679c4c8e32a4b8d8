"""From logits to the next token."""

from operator import index

import torch
from torch import Tensor

from kernels import draw_tokens, takes_draw_tokens


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError naming the option, its value and what is allowed."""
    for name, value in (("temperature", temperature), ("top_p", 1 if top_p is None else top_p)):
        if not hasattr(value, "__float__"):
            raise ValueError(f"{name}={value!r} must be a number")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number")
    if top_k is not None:
        whole("top_k", top_k, 1, "; None (null) keeps every token")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1; None (null) keeps every token")


def whole(name: str, value: object, least: int, remedy: str = "") -> int:
    """The value as an int, from any integer type, NumPy's too, but not from a boolean. Raises ValueError."""
    try:
        number = least - 1 if isinstance(value, bool) else int(index(value))
    except TypeError:
        number = least - 1
    if not least <= number < 2**64:  # the range of PyTorch's seeds
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least} and below 2^64{remedy}")
    return number


def choose_next_token(
    logits: Tensor,
    uniform: Tensor | None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token for each row of logits, without waiting for the device.

    `top_k` keeps the k likeliest tokens; then `top_p` keeps the fewest of those whose share reaches p
    (nucleus sampling, arXiv:1904.09751). Temperature 0 picks the likeliest.

    Args:
        logits: (S, V), any float dtype and device.
        uniform: (S,) float64 in [0, 1), on any device, which decides the draws. Drawn on the CPU it gives the same text
            on every device, up to the rounding of the logits. At temperature 0 it is not read and may be None.
        out: (S,) int64, on the device of logits, to which tokens are written; None: to a new tensor.

    Returns:
        (S,) int64, on the device of logits.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        fast = takes_draw_tokens(logits, 1)
        return draw_tokens(logits, None, temperature=0, out=out) if fast else torch.argmax(logits, dim=-1, out=out)
    device = logits.device
    if device.type == "mps":  # which has no float64
        logits = logits.cpu()
    uniform = uniform.to(logits.device)
    if takes_draw_tokens(logits, top_k):
        top_k = top_k and min(top_k, logits.size(1))
        return draw_tokens(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p, out=out)
    logits, ids = likeliest(logits, top_k or logits.size(1))  # (S, K) each
    # The largest logit goes to 0 before the division: a temperature of 1e-6 must not overflow.
    probs = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)  # (S, K)
    if top_p is not None:
        mass_before = probs.cumsum(dim=-1) - probs
        # strictly below p: the token that reaches p is the last one kept, and the first always is
        probs = probs * (mass_before < top_p * probs.sum(dim=-1, keepdim=True))
    # Inverse of the cumulative distribution: the first token whose cumulative mass exceeds u x total.
    cumulative = probs.cumsum(dim=-1)
    rank = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)  # (S, 1)
    # u x total may round up to the total itself, which would point past the last token kept
    rank = torch.minimum(rank, (probs > 0).sum(dim=-1, keepdim=True) - 1)
    rank = rank.clamp(min=0)  # where logits are NaN no token is probable, and -1 as an index is a fault on a GPU
    tokens = ids.gather(1, rank).squeeze(1)
    return tokens.to(device) if out is None else out.copy_(tokens)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their ids (S, count), largest first, among equals the smaller id first.

    In float64, as the softmax would round unequal logits to equal probabilities.
    """
    vocab_size = logits.size(1)
    if count >= vocab_size or logits.dtype == torch.float64:
        ordered, ids = logits.double().sort(dim=-1, descending=True, stable=True)
        return ordered[:, :count], ids[:, :count]
    # One integer holds logit and id, so that equal logits have one order on every device. The bits of floats are in
    # the order of their values, those of negative floats in the reverse order.
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    backwards = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    ids = vocab_size - 1 - ((order | backwards).topk(count, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(1, ids).double(), ids


def marked(prompt: str) -> str:
    """A prompt as it is shown before its continuation."""
    return f"[{prompt}]" if prompt else ""
