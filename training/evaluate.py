"""Evaluation on fixed windows, the unigram baseline, and text samples.

Protocol: `windows` non-overlapping windows of seq_len tokens, evenly spaced over the validation split; each target is
predicted from the tokens before it in its window (a context of 1 to seq_len tokens, stride seq_len). Bytes are the
decoded targets' UTF-8, without end-of-text; the blank that a folder's tokenizer may put before each text counts too.
"""

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tiktoken
import torch
from torch import nn

from data import Dataset, document_starts, fixed_windows
from model import GPT, generate
from model.sampling import marked
from training.hardware import Hardware
from training.step import packed_rows


@dataclass(frozen=True)
class EvaluationSet:
    """The windows of an evaluation, and the size of their targets' text in bytes.

    inputs, targets: (windows, seq_len) int64 on the CPU.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    bytes: int

    @classmethod
    def of(cls, dataset: Dataset, seq_len: int, windows: int) -> "EvaluationSet":
        """`fixed_windows` of the dataset's validation split."""
        inputs, targets = fixed_windows(dataset.validation, seq_len, windows)
        tokenizer = dataset.tokenizer
        end_of_text = tokenizer.eot_token  # which is no text
        texts = ([token for token in row if token != end_of_text] for row in targets.tolist())
        return cls(inputs, targets, sum(len(tokenizer.decode_bytes(text)) for text in texts))

    @property
    def protocol(self) -> dict[str, int]:
        count, seq_len = self.targets.shape
        return {
            "windows": count,
            "context_tokens": seq_len,
            "stride_tokens": seq_len,
            "tokens": self.targets.numel(),
            "bytes": self.bytes,
        }

    def metrics(self, mean_loss: float) -> dict[str, float]:
        """Loss (nats a token), perplexity and bits per byte; a perplexity past float64 is inf."""
        nats = mean_loss * self.targets.numel()
        return {
            "val_loss": mean_loss,
            "val_perplexity": math.exp(mean_loss) if mean_loss < 700 else math.inf,
            "val_bits_per_byte": nats / math.log(2) / max(1, self.bytes),
        }


@torch.no_grad()
def evaluate(
    model: nn.Module, windows: EvaluationSet, micro_batch: int, hardware: Hardware, end_of_text: int | None = None
) -> dict[str, float]:
    """Run the model over all windows; its mode is restored, and no random number is drawn.

    With `end_of_text` documents do not see each other, as in training. The processes of `hardware.world` share the
    windows and call the model equally often; the losses are added in the windows' order for any number of processes.
    """
    world = hardware.world
    was_training = model.training
    model.eval()
    losses, together = [], world.data_size * micro_batch
    for first in range(0, len(windows.inputs), together):
        start = first + world.data_rank * micro_batch
        inputs, targets = (x[start : start + micro_batch] for x in (windows.inputs, windows.targets))
        if len(inputs) < micro_batch:  # one shape for all batches, so that nothing is compiled twice
            padding = (0, 0, 0, micro_batch - len(inputs))
            inputs = nn.functional.pad(inputs, padding)
            targets = nn.functional.pad(targets, padding, value=-1)
        starts = None if end_of_text is None else document_starts(inputs, end_of_text)
        documents = packed_rows(starts, 0, *inputs.shape, hardware.device)
        with hardware.autocast():
            loss = model(inputs.to(hardware.device), targets.to(hardware.device), **documents)
        losses.append(loss.item())  # fp32, added as float64
    model.train(was_training)
    shares = world.all_gather(losses)[:: world.context]  # processes that share rows have the same
    in_order = chain.from_iterable(zip(*shares, strict=True))
    return windows.metrics(sum(in_order) / windows.targets.numel())


def prompt_of(text: str, dataset: Dataset, seq_len: int) -> list[int]:
    """The prompt of samples: the tokens of train.sample_prompt, or if that is empty the validation split's first
    whole words. ValueError for a text that cannot be tokenized."""
    try:
        given = dataset.tokenizer.encode_ordinary(text)
    except ValueError as error:
        raise ValueError(f"train.sample_prompt={text} cannot be tokenized: {error}") from error
    most = min(32, seq_len)
    return given or whole_words(dataset.validation[: 4 * most].tolist(), most, dataset.tokenizer)


def whole_words(tokens: list[int], most: int, tokenizer: tiktoken.Encoding) -> list[int]:
    """At most `most` of `tokens`, beginning where a word begins and ending where one ends.

    The first word may be half of one, so it is left out. Without any blank, whole characters are used.
    """
    pieces = [tokenizer.decode_bytes([token]) for token in tokens]
    after_blank = [False, *(piece[-1:].isspace() for piece in pieces[:-1])]
    begins = [bool(p.strip()) and (p[:1].isspace() or blank) for p, blank in zip(pieces, after_blank, strict=True)]
    ends = [p[:1].isspace() and not blank for p, blank in zip(pieces, after_blank, strict=True)]
    is_character = [not 0x80 <= p[0] < 0xC0 for p in pieces]  # and not a later byte of one

    def first(places: list[bool], start: int) -> int | None:
        return next((place for place in range(start, len(places)) if places[place]), None)

    def last(places: list[bool], start: int) -> int | None:
        return next((place for place in range(min(start + most, len(places) - 1), start, -1) if places[place]), None)

    start = first(begins, 1) or first(is_character, 0) or 0
    end = last(ends, start) or last(is_character, start) or start + most
    return tokens[start:end]


def sample(
    model: GPT, prompt: list[int], new_tokens: int, seed: int, tokenizer: tiktoken.Encoding, hardware: Hardware
) -> str:
    """The prompt in brackets and the model's continuation; no number is drawn from a training stream."""
    with hardware.autocast():
        steps = generate(model, [prompt], max_new_tokens=new_tokens, temperature=0.8, top_k=200, seed=seed)
        drawn = [token for step in steps for _, token in step]
    shown, continuation = (tokenizer.decode_bytes(part).decode("utf-8", errors="replace") for part in (prompt, drawn))
    return marked(shown) + continuation


def unigram_loss(train_tokens: np.ndarray, targets: torch.Tensor, vocab_size: int) -> float:
    """Cross-entropy (nats a token) of `targets` under the training split's token frequencies, add-one smoothed."""
    counts = np.ones(vocab_size, dtype=np.float64)
    for start in range(0, len(train_tokens), 1 << 24):  # a memory-mapped split may be larger than memory
        counts += np.bincount(train_tokens[start : start + (1 << 24)], minlength=vocab_size)
    log_probability = np.log(counts / counts.sum())
    return float(-log_probability[targets.numpy().ravel()].mean())
