"""Token arrays to batches. Which tokens a batch holds is a pure function of (seed, step, rank): nothing is stored.

A split of n tokens holds (n - 1) // seq_len windows of seq_len inputs; the targets are the inputs shifted by one, so
neighbouring windows share one token and no target is learnt twice in an epoch. The few tokens after the last whole
window are never seen.
"""

import numpy as np
import torch

from data.shards import Tokens


class TokenBatches:
    """Every window once an epoch, in an order drawn from (seed, epoch).

    Args:
        tokens: one split, 1-D, any unsigned dtype.
        seq_len: tokens of a window.
        batch_size: sequences of one optimizer step of one rank, over all micro-batches.
        seed: 0 to 2^64 - 1.
        rank, world_size: this process among those that share each step.
        shifted: whether each epoch's windows begin at another token, drawn from (seed, epoch) among the first seq_len:
            a text that is read many times is then never cut at the same places. An epoch has one window less.

    Sample `step * batch_size * world_size + rank * batch_size + i` of the endless sequence of epochs is row i of the
    batch; an epoch may end in the middle of a batch.
    """

    def __init__(
        self,
        tokens: Tokens,
        seq_len: int,
        batch_size: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shifted: bool = False,
    ) -> None:
        assert batch_size > 0
        assert 0 <= rank < world_size
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed={seed} must lie between 0 and 2^64 - 1")
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.rank, self.world_size, self.shifted = rank, world_size, shifted
        self.windows_per_epoch = num_windows(tokens, seq_len) - shifted
        assert self.windows_per_epoch > 0, "open_dataset refuses a text that is too short"
        self._orders: dict[int, np.ndarray] = {}  # epoch -> first tokens; only the epochs of the last batch

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step: int64 on the CPU, (batch_size, seq_len), contiguous."""
        first = step * self.batch_size * self.world_size + self.rank * self.batch_size
        samples = range(first, first + self.batch_size)
        epochs = range(samples[0] // self.windows_per_epoch, samples[-1] // self.windows_per_epoch + 1)
        self._orders = {e: self._orders[e] if e in self._orders else self._order(e) for e in epochs}
        firsts = [int(self._orders[s // self.windows_per_epoch][s % self.windows_per_epoch]) for s in samples]
        return gather(self.tokens, firsts, self.seq_len)

    def whole(self) -> "TokenBatches":
        """The same batches, each with the rows of all ranks."""
        return TokenBatches(
            self.tokens, self.seq_len, self.batch_size * self.world_size, self.seed, shifted=self.shifted
        )

    def _order(self, epoch: int) -> np.ndarray:
        # numpy promises that a bit generator's raw numbers never change, but not `permutation`: sorting raw numbers
        # gives a resumed run the same order under any version
        generator = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        firsts = self.seq_len * np.argsort(generator.random_raw(self.windows_per_epoch), kind="stable")
        return firsts + int(generator.random_raw()) % self.seq_len if self.shifted else firsts


def fixed_windows(tokens: Tokens, seq_len: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` windows (or as many as there are), evenly spaced and without overlap: the same ones at every call.

    Returns inputs and targets, int64 on the CPU, (windows, seq_len).
    """
    available = num_windows(tokens, seq_len)
    count = min(count, available)
    return gather(tokens, [i * available // count * seq_len for i in range(count)], seq_len)


def document_starts(inputs: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Where documents begin in `inputs` (sequences, seq_len), counted over all its tokens: int32 on the CPU, rising.

    A document begins with the end-of-text token before it, which predicts its first word. Each sequence also begins a
    document, whatever it starts with.
    """
    begins = inputs == end_of_text
    begins[:, 0] = True
    return begins.flatten().nonzero().flatten().to(torch.int32)


def num_windows(tokens: Tokens, seq_len: int) -> int:
    return (len(tokens) - 1) // seq_len


def gather(tokens: Tokens, firsts: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the windows that begin at these tokens, int64, (len(firsts), seq_len)."""
    rows = np.empty((len(firsts), seq_len + 1), dtype=tokens.dtype)
    for row, first in zip(rows, firsts, strict=True):
        row[:] = tokens[first : first + seq_len + 1]
    # two contiguous copies: the transfer to a GPU and the loss both need them
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
