"""What a step of generation reads and writes on the device, kept from call to call with the step's CUDA graph.

To capture a step takes the time of many replays, and a captured one stays right as long as all that it reads and writes
is where it was. So the last call of a model leaves its state here: small tensors and the graph, some ten megabytes.
The memory of keys and values is given back to a pool from which others take only what they would fail without; so the
next call, which asks for as much, is given the same.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.cache import ABSENT, PagedKVCache
from model.gpt import GPT

IDLE: "WeakKeyDictionary[GPT, StepState]" = WeakKeyDictionary()  # of each model the last one, until a call takes it


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The current one, in whose order tensors are used; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def allocating(pool: "torch.cuda.MemPool | None", device: torch.device) -> AbstractContextManager:
    """Tensors made within are in the pool's memory; None: they are where they always are."""
    return nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device)


class StepState:
    """The rows of one call of generate() at a time.

    cache: no row in use.
    uniform: (samples, tokens) float64 in [0, 1), which decides each draw of each sample; None: nothing is drawn, the
        likeliest token is taken.
    """

    def __init__(self, cache: PagedKVCache, uniform: Tensor | None, pool: "torch.cuda.MemPool | None" = None):
        self.cache, self.device, num_rows = cache, cache.lengths.device, len(cache.reserved)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no float64
        self.uniform = None if uniform is None else uniform.to(self.device, dtype)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)  # of each row, the newest
        self.sample = torch.zeros_like(self.tokens)  # of each row: which sample of its prompt it is
        self.drawn = torch.zeros_like(self.tokens)  # of each row: tokens generated
        # recorded behind the newest tokens' copy to the host; external: the graph waits for the record of the moment
        self.copied = torch.cuda.Event(external=True) if self.device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None  # of a step
        self.captured: tuple = ()  # what it is right for
        self._kind: tuple = ()
        self._pool = pool  # of the cache
        self._resting: list[Tensor] = []  # without memory, in the order of the places where they had it
        self._stream = stream_of(self.device)

    @classmethod
    def of(
        cls, model: GPT, num_rows: int, max_tokens: int, page: int, dtype: torch.dtype | None, uniform: Tensor | None
    ) -> "StepState":
        """The one that the model's last call has left, where it is of these sizes, else a new one.

        num_rows, max_tokens, page, dtype: as of `GPT.make_cache`, which raises ValueError.
        """
        device, drawn = model.embedding.weight.device, None if uniform is None else uniform.shape
        kind = num_rows, -(-max_tokens // page), page, dtype or model.compute_dtype, drawn
        state = IDLE.pop(model, None)
        fits = state is not None and state._kind == kind and state._stream == stream_of(device)
        if not (fits and state._wake(uniform)):
            state = None  # with what memory it has
        if state is None:
            pool = None
            if device.type == "cuda":
                with torch.cuda.device(device):  # a pool is of the current one
                    pool = torch.cuda.MemPool(use_on_oom=True)
            with allocating(pool, device):
                cache = model.make_cache(num_rows, max_tokens, page, dtype)
            state = cls(cache, uniform, pool)
            state._kind = kind
        state.cache.max_tokens = max_tokens
        return state

    def rest(self, model: GPT) -> None:
        """Give the memory of keys and values back, and wait for the model's next call."""
        if stream_of(self.device) == self._stream:  # another one would not wait for what that one does
            self.cache.free(*[row for row, length in enumerate(self.cache.reserved) if length != ABSENT])
            self._resting = sorted(self._stored(), key=Tensor.data_ptr)
            for stored in self._resting:
                stored.untyped_storage().resize_(0)
            IDLE[model] = self

    def _wake(self, uniform: Tensor | None) -> bool:
        """Undo `rest`; False where there is no memory for it."""
        try:
            with allocating(self._pool, self.device):
                for stored in self._resting:  # of places as large the first one is taken first
                    stored.untyped_storage().resize_(stored.numel() * stored.element_size())
        except torch.OutOfMemoryError:
            return False
        for stored in (self.cache.keys, self.cache.values):
            stored.zero_()
        for scale in self.cache.scales:
            scale.fill_(1.0)
        if uniform is not None:
            self.uniform.copy_(uniform, non_blocking=True)
        return True

    def _stored(self) -> list[Tensor]:
        return [self.cache.keys, self.cache.values, *self.cache.scales]
