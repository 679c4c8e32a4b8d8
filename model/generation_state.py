"""What a step of generation reads and writes on the device, kept from call to call with the step's CUDA graph.

Capturing a step takes the time of many replays, and a captured step stays valid while everything that it reads and
writes keeps its address. So the last call of a model leaves its state here: small tensors and the graph, some ten
megabytes. The memory of keys and values goes back to a pool, from which other allocations are served only where they
would otherwise fail; so the next call, which needs as much, gets the same addresses.
"""

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model.cache import ABSENT, PagedKVCache
from model.gpt import GPT

IDLE: "WeakKeyDictionary[GPT, StepState]" = WeakKeyDictionary()  # each model's last state, until a call reuses it


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream, in whose order tensors are used; None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def allocating(pool: "torch.cuda.MemPool | None", device: torch.device) -> AbstractContextManager:
    """Inside, tensors are allocated from the pool; None: from the default allocator."""
    return nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device)


class StepState:
    """The rows of generate(), for one call at a time.

    cache: with no row in use.
    uniform: (samples, tokens) float64 in [0, 1), which decides each draw of each sample; None: nothing is drawn, the
        likeliest token is chosen.
    """

    def __init__(self, cache: PagedKVCache, uniform: Tensor | None, pool: "torch.cuda.MemPool | None" = None):
        self.cache, self.device, num_rows = cache, cache.lengths.device, len(cache.reserved)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no float64
        self.uniform = None if uniform is None else uniform.to(self.device, dtype)
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)  # of each row, the newest
        self.sample = torch.zeros_like(self.tokens)  # of each row: which sample of its prompt it is
        self.drawn = torch.zeros_like(self.tokens)  # of each row: tokens generated
        # recorded after the newest tokens' copy to the host; external: a replay waits for the latest record
        self.copied = torch.cuda.Event(external=True) if self.device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None  # of a step
        self.captured: tuple = ()  # what the graph is valid for
        self._kind: tuple = ()
        self._pool = pool  # of the cache
        self._resting: list[Tensor] = []  # tensors without memory, in the order of their former addresses
        self._stream = stream_of(self.device)

    @classmethod
    def of(
        cls, model: GPT, num_rows: int, max_tokens: int, page: int, dtype: torch.dtype | None, uniform: Tensor | None
    ) -> "StepState":
        """The state that the model's last call has left, where it has these sizes, else a new one.

        num_rows, max_tokens, page, dtype: as in `GPT.make_cache`, which raises ValueError.
        """
        device, drawn = model.embedding.weight.device, None if uniform is None else uniform.shape
        kind = num_rows, -(-max_tokens // page), page, dtype or model.compute_dtype, drawn
        state = IDLE.pop(model, None)
        fits = state is not None and state._kind == kind and state._stream == stream_of(device)
        if not (fits and state._wake(uniform)):
            state = None  # frees what memory it has
        if state is None:
            pool = None
            if device.type == "cuda":
                with torch.cuda.device(device):  # a pool belongs to the current device
                    pool = torch.cuda.MemPool(use_on_oom=True)
            with allocating(pool, device):
                cache = model.make_cache(num_rows, max_tokens, page, dtype)
            state = cls(cache, uniform, pool)
            state._kind = kind
        state.cache.max_tokens = max_tokens
        return state

    def rest(self, model: GPT) -> None:
        """Give the memory of keys and values back, and keep the rest for the model's next call."""
        if stream_of(self.device) == self._stream:  # another stream would not wait for this one's work
            self.cache.free(*[row for row, length in enumerate(self.cache.reserved) if length != ABSENT])
            self._resting = sorted(self._stored(), key=Tensor.data_ptr)
            for stored in self._resting:
                stored.untyped_storage().resize_(0)
            IDLE[model] = self

    def _wake(self, uniform: Tensor | None) -> bool:
        """Undo `rest`; False where there is no memory for it."""
        try:
            with allocating(self._pool, self.device):
                for stored in self._resting:  # of equally large places the first is used first
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
