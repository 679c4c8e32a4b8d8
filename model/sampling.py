"""From logits to text: choosing the next token, and the loop that feeds it back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from model.gpt import GPT

PREFILL_TOKENS = 1024  # the prompt goes in by pieces: the logits of 32,768 tokens x 50,257 ids are 6.6 GB


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise ValueError naming the option, its value and what is allowed."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or a positive number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1; leave it out to keep every token")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1; leave it out to keep every token")


def choose_next_token(
    logits: Tensor,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one token for each row of logits.

    `top_k` keeps the k likeliest tokens; then `top_p` keeps the fewest of those whose share reaches p
    (nucleus sampling, arXiv:1904.09751). Temperature 0 takes the likeliest and draws nothing.

    Args:
        logits: (S, V), any float dtype and device.
        generator: a CPU generator. One uniform number a row is all that is drawn, and always on the CPU, so a
            seed gives the same text on every device (up to the rounding of the logits).

    Returns:
        (S,) int64, on the device of logits.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(dim=-1)
    device = logits.device
    if device.type == "mps":  # which has no float64
        logits = logits.cpu()
    # Sorted before the softmax, which rounds unequal logits to equal probabilities.
    logits, ids = logits.double().sort(dim=-1, descending=True, stable=True)  # (S, V), likeliest first
    # The largest logit goes to 0 before the division: a temperature of 1e-6 must not overflow.
    probs = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)  # (S, V)
    if top_k is not None:
        probs[:, top_k:] = 0
    if top_p is not None:
        mass_before = probs.cumsum(dim=-1) - probs
        # strictly below p: the token that reaches p is the last one kept, and the first always is
        probs = probs * (mass_before < top_p * probs.sum(dim=-1, keepdim=True))
    # Inverse of the cumulative distribution: the first token whose cumulative mass exceeds u x total.
    cumulative = probs.cumsum(dim=-1)
    uniform = torch.rand(logits.size(0), 1, dtype=torch.float64, generator=generator).to(logits.device)
    rank = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)  # (S, 1)
    # u x total may round up to the total itself, which would point past the last token kept
    rank = torch.minimum(rank, (probs > 0).sum(dim=-1, keepdim=True) - 1)
    return ids.gather(1, rank).squeeze(1).to(device)


def generate(
    model: GPT,
    prompt_tokens: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_samples: int = 1,
    stop_token: int | None = None,
) -> Iterator[Tensor]:
    """Continue a prompt, one token at a time as it comes.

    The prompt is read once into a KV cache, then every step computes one token. When the context reaches the
    model's seq_len, its last half is read again and generation goes on; of a longer prompt the last seq_len
    tokens count. Random numbers come from a generator of this call alone, and the model is in eval mode only
    while it computes, so generating in the middle of training changes nothing.

    Args:
        model: not the compiled one; a compiled model would be compiled again for every length.
        prompt_tokens: the ids to continue, at least one.
        max_new_tokens: how many tokens to add to each sample.
        num_samples: continuations drawn side by side.
        stop_token: a sample that has drawn it repeats it; when all have, the iteration ends.

    Yields:
        (num_samples,) int64 on the model's device: the next token of each sample.

    Raises:
        ValueError: an impossible option, at the call and not at the first token.
    """
    check_sampling(temperature, top_k, top_p)
    device = model.embedding.weight.device
    prompt = torch.as_tensor(prompt_tokens, dtype=torch.int64, device=device)
    if prompt.dim() != 1 or prompt.numel() == 0:
        raise ValueError(f"the prompt has shape {tuple(prompt.shape)}; give a list of at least one token")
    if prompt.min() < 0 or prompt.max() >= model.vocab_size:
        raise ValueError(f"a prompt id lies outside 0..{model.vocab_size - 1}; use the model's tokenizer")
    if num_samples < 1 or max_new_tokens < 0:
        raise ValueError(f"num_samples={num_samples} must be at least 1, max_new_tokens={max_new_tokens} at least 0")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    generator = torch.Generator().manual_seed(seed)
    return _stream(model, prompt.expand(num_samples, -1), max_new_tokens, generator, options, stop_token)


@torch.no_grad()
def _stream(
    model: GPT,
    context: Tensor,
    max_new_tokens: int,
    generator: torch.Generator,
    options: dict,
    stop_token: int | None,
) -> Iterator[Tensor]:
    """The loop of `generate`; context is (S, N)."""
    cache = model.make_cache(batch_size=context.size(0))
    finished = torch.zeros(context.size(0), dtype=torch.bool, device=context.device)
    context = context[:, -model.seq_len :]
    new = context  # what the cache has not seen yet
    for _ in range(max_new_tokens):
        if cache.length + new.size(1) > model.seq_len:
            cache.reset()
            new = context[:, -max(1, model.seq_len // 2) :]
        with evaluating(model):
            for piece in new.split(PREFILL_TOKENS, dim=1):
                logits = model(piece, kv_cache=cache)  # (S, N, V)
        token = choose_next_token(logits[:, -1], generator, **options)  # (S,)
        if stop_token is not None:
            token = token.masked_fill(finished, stop_token)
            finished = finished | (token == stop_token)
        new = token[:, None]
        context = torch.cat((context, new), dim=1)[:, -model.seq_len :]
        yield token
        if stop_token is not None and finished.all():
            return


def marked(prompt: str) -> str:
    """A prompt as it is shown before its continuation."""
    return f"[{prompt}]" if prompt else ""


@contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Put the model in eval mode, and back as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
