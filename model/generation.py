"""Continuing texts: many at a time, each for as long as it takes, one token of each a step.

Sequences wait in line for a row of a paged KV cache. Prompts that get a row at the same time are read in one call, end
to end without padding; samples of one prompt share its pages. Then each step is the same work whatever the rows hold,
so that on a GPU it is one CUDA graph: the model's call, the choice of tokens, their way into the next call. The host
reads a step's tokens while the next step runs; a row whose text has ended goes to the next in line.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention import flash
from model.cache import KVCache, PagedKVCache, Prompts
from model.gpt import GPT
from model.sampling import check_sampling, choose_next_token

PAGE = 128  # tokens: a tile of the decode kernel lies in one page
PROMPT_TOKENS = 32768  # read in one call, where there is more than one prompt
Drawn = list[tuple[int, int]]  # (sequence, token)


@torch.inference_mode(False)  # whoever goes on outside of it writes to what is made here
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_samples: int = 1,
    stop_token: int | None = None,
    batch_size: int = 64,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Drawn]:
    """Continue prompts of any lengths, token by token as they come.

    When a context reaches the model's seq_len its last half is read again and its text goes on; of a longer prompt the
    last seq_len tokens count. The text of a sequence follows from its prompt, the seed, num_samples and the number of
    its sample, not from other prompts beside it, up to the rounding of the logits. Random numbers come from a generator
    of this call alone, and the model is copied to the dtype it would run in now (weights that are in it already are
    shared), so generating in the middle of training changes nothing.

    Args:
        model: not a compiled one.
        prompts: of each the ids to continue, at least one.
        max_new_tokens: how many tokens to add to each sequence.
        temperature, top_k, top_p: as in `choose_next_token`.
        seed: of the draws, the same for each prompt.
        num_samples: continuations of each prompt; sequence i is sample i % num_samples of prompt i // num_samples.
        stop_token: a sequence that has drawn it ends.
        batch_size: the most sequences that are continued at a time.
        cache_dtype: of keys and values: None, as attention; int8 and float8_e4m3fn take half the room.

    Yields:
        What a step, or the reading of prompts, has drawn: (sequence, token) of each sequence that goes on.

    Raises:
        ValueError: an impossible option, at the call and not at the first token.
    """
    check_sampling(temperature, top_k, top_p)
    prompts, contexts = list(prompts), []  # arrays: a list of as many ids would keep a GPU waiting
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not isinstance(prompt, Sequence | Tensor):
            raise ValueError(f"prompt {number} is {prompt!r}; give a list of prompts, each a list of ids")
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; give at least one token")
        try:
            ids = array("q", iter(prompt))  # of bytes themselves it would take eight for an id
        except (TypeError, OverflowError) as error:
            raise ValueError(f"prompt {number} is no list of ids ({error}); give whole numbers") from error
        least, largest = torch.frombuffer(ids, dtype=torch.int64).aminmax()
        if least < 0 or largest >= model.vocab_size:
            raise ValueError(
                f"an id of prompt {number} lies outside 0..{model.vocab_size - 1}; use the model's tokenizer"
            )
        contexts.append(ids[-model.seq_len :])
    num_samples, batch_size = _whole("num_samples", num_samples, 1), _whole("batch_size", batch_size, 1)
    max_new_tokens, seed = _whole("max_new_tokens", max_new_tokens, 0), _whole("seed", seed, -(2**63))
    stop_token = None if stop_token is None else _whole("stop_token", stop_token, -(2**63))
    if cache_dtype not in (None, torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"cache_dtype={cache_dtype} must be None, torch.int8 or torch.float8_e4m3fn")
    if len(prompts) == 0 or max_new_tokens == 0:
        return iter(())
    sequences = [
        Continued(number * num_samples + sample, sample, context)
        for number, context in enumerate(contexts)
        for sample in range(num_samples)
    ]
    draws = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(max_new_tokens, num_samples, dtype=torch.float64, device="cpu", generator=draws)
    choose = partial(choose_next_token, temperature=temperature, top_k=top_k, top_p=top_p)
    if model.config.name is not None:
        if cache_dtype is not None:
            raise ValueError(f"cache_dtype={cache_dtype} is for a GPT of ours; {model.config.name} has its own cache")
        return model.continued(sequences, uniform.T, choose, stop_token)
    longest = max(map(len, contexts)) + max_new_tokens
    with torch.no_grad():
        twin = model.for_inference(model.compute_dtype)
        cache = twin.make_cache(min(batch_size, len(sequences)), min(longest, model.seq_len), PAGE, cache_dtype)
    return Generation(twin, cache, uniform.T, choose, stop_token, greedy=temperature == 0).run(sequences)


def _whole(name: str, value: object, least: int) -> int:
    """The value as an int. Raises ValueError."""
    try:
        number = int(index(value))
    except TypeError:
        number = least - 1
    if not least <= number < 2**64:  # PyTorch's seeds
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least} and below 2^64")
    return number


@dataclass(eq=False)
class Continued:
    """A text that is being continued."""

    number: int
    sample: int  # which of its prompt's
    context: array  # ids to be read, or that were; samples of a prompt have one array
    new: list[int] = field(default_factory=list)  # what followed it, as far as the host knows
    drawn: int = 0  # tokens that the device was asked for
    stopped: bool = False


class Step(NamedTuple):
    """Tokens on their way to the host."""

    sequences: list[Continued | None]
    tokens: Tensor  # (sequences,) int64 on the host; those of None mean nothing
    arrived: torch.cuda.Event | None


class Generation:
    """The rows of a cache and the texts that have them.

    Args:
        model: in the dtype to run in.
        cache: of the model, no row in use.
        uniform: (samples, tokens) float64: what decides each draw of each sample.
        choose: (logits (S, V), uniform (S,)) -> tokens (S,).
        stop_token: as in `generate`.
        greedy: `choose` asks for no uniform, and is given None.
    """

    def __init__(
        self,
        model: GPT,
        cache: PagedKVCache,
        uniform: Tensor,
        choose: Callable[[Tensor, Tensor | None], Tensor],
        stop_token: int | None,
        greedy: bool = False,
    ):
        self.model, self.cache, self.choose, self.stop_token, self.greedy = model, cache, choose, stop_token, greedy
        self.device, num_rows = cache.lengths.device, len(cache.length_of)
        self.uniform = uniform.to(self.device, torch.float32 if self.device.type == "mps" else torch.float64)
        self.sequence_of: list[Continued | None] = [None] * num_rows
        # The newest token of each row, and the one before it: a step reads one half and writes the other, so that its
        # tokens are on their way to the host while the next step runs.
        self.tokens = torch.zeros(2, num_rows, dtype=torch.int64, device=self.device)
        self.half = 0  # of the newest
        self.sample = torch.zeros_like(self.tokens[0])  # which of its prompt's a row is
        self.drawn = torch.zeros_like(self.tokens[0])  # tokens of a row's text
        self.on_cuda = self.device.type == "cuda"
        self.copies = torch.cuda.Stream(self.device) if self.on_cuda else None  # to the host
        # other attentions, also those that stand in for it (`attend_with`), ask the host for lengths
        self.takes_graph = self.on_cuda and all(block.attention.attend is flash for block in model.blocks)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # of a step, by the half that it reads
        self.compiled = False  # a first step has run

    def run(self, sequences: list[Continued]) -> Iterator[Drawn]:
        """Continue the sequences until all have ended."""
        waiting, on_their_way = deque(sequences), deque()
        while True:
            if waiting and None in self.sequence_of:
                on_their_way.append(self._read_prompts(waiting))
            if len(self.graphs) < 2:  # over such a step the host takes its time
                yield from self._handed_over(on_their_way, 0)
            rows = [row for row, sequence in enumerate(self.sequence_of) if sequence]
            full = [row for row in rows if self.cache.length_of[row] == self.cache.max_tokens]
            if rows and not full:
                on_their_way.append(self._launch(rows))
            elif not on_their_way and not waiting and not full:
                return
            yield from self._handed_over(on_their_way, 1 if rows and not full else 0)
            for row in full:  # all of their tokens have arrived
                if sequence := self.sequence_of[row]:
                    self._release(sequence)
                    half = max(1, self.cache.max_tokens // 2)
                    sequence.context, sequence.new = (sequence.context + array("q", sequence.new))[-half:], []
                    waiting.appendleft(sequence)

    def _handed_over(self, on_their_way: deque[Step], left: int) -> Iterator[Drawn]:
        while len(on_their_way) > left:
            if drawn := self._arrived(on_their_way.popleft()):
                yield drawn

    @torch.no_grad()
    def _read_prompts(self, waiting: deque[Continued]) -> Step:
        """Give free rows to those who wait, read their contexts in one call, draw a token of each."""
        taken: list[tuple[int, Continued]] = []
        readers: list[int] = []  # rows that read; the others are forks of the last reader before them
        reader_of, counts, tokens = [], [], array("q")
        for row in [row for row, sequence in enumerate(self.sequence_of) if sequence is None]:
            if not waiting:
                break
            context = waiting[0].context
            if not taken or context is not taken[-1][1].context:
                if readers and len(tokens) + len(context) > PROMPT_TOKENS:
                    break
                readers.append(row)
                counts.append(len(context))
                tokens += context
                self.cache.allocate(row)
            taken.append((row, waiting.popleft()))
            reader_of.append(len(readers) - 1)
        self.cache.extend(readers, counts)
        prompts = self.cache.prompts(readers)
        ids = torch.frombuffer(tokens, dtype=torch.int64)
        logits = self._logits(ids[None].to(self.device), prompts)[0]  # (readers, V)
        for (row, _), reader in zip(taken, reader_of, strict=True):
            if row != readers[reader]:
                self.cache.fork(readers[reader], row)
        rows = torch.tensor([row for row, _ in taken], device=self.device)
        self.sample[rows] = torch.tensor([sequence.sample for _, sequence in taken], device=self.device)
        self.drawn[rows] = torch.tensor([sequence.drawn for _, sequence in taken], device=self.device)
        first = self._draw(logits[reader_of], self.sample[rows], self.drawn[rows])
        if self.copies:  # of what was in these rows
            torch.cuda.current_stream(self.device).wait_stream(self.copies)
        self.tokens[self.half, rows] = first
        self.drawn[rows] += 1
        for row, sequence in taken:
            self.sequence_of[row] = sequence
        return self._send(first, [sequence for _, sequence in taken])

    @torch.no_grad()
    def _launch(self, rows: list[int]) -> Step:
        """One more token of each row in use."""
        self.cache.extend(rows, 1)
        if self.takes_graph and self.compiled:
            if self.half not in self.graphs:
                self.graphs[self.half] = self._captured(self.half)
            self.graphs[self.half].replay()
            self.cache.count_stored(1)
        else:
            self._step(self.half)
            self.compiled = True
        self.half ^= 1
        return self._send(self.tokens[self.half], list(self.sequence_of))

    def _step(self, half: int) -> None:
        """The device's part of a step, the same for whatever the rows hold; it reads this half of the tokens."""
        logits = self._logits(self.tokens[half, :, None], self.cache)[:, 0]  # (rows, V)
        self.tokens[half ^ 1] = self._draw(logits, self.sample, self.drawn)
        if not self.greedy:
            self.drawn += 1

    def _captured(self, half: int) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # not torch.cuda.graph, which empties the allocator's cache; other threads may allocate meanwhile
            pool = next((other.pool() for other in self.graphs.values()), None)  # they take turns
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._step(half)
            graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph

    def _logits(self, tokens: Tensor, cache: KVCache | Prompts) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):  # the weights have its dtype
            return self.model(tokens, kv_cache=cache)

    def _draw(self, logits: Tensor, sample: Tensor, drawn: Tensor) -> Tensor:
        """A token for each row of logits (S, V); `drawn` of rows that are not in use goes past the last draw."""
        if self.greedy:
            return self.choose(logits, None)
        return self.choose(logits, self.uniform[sample, drawn.clamp(max=self.uniform.size(1) - 1)])

    def _send(self, tokens: Tensor, sequences: list[Continued | None]) -> Step:
        """Start the tokens' way to the host. A sequence that has now asked for all of its tokens leaves its row."""
        host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=self.on_cuda)
        arrived = None
        if self.copies:
            self.copies.wait_stream(torch.cuda.current_stream(self.device))
            tokens.record_stream(self.copies)
            with torch.cuda.stream(self.copies):
                host.copy_(tokens, non_blocking=True)
                arrived = self.copies.record_event()
        else:
            host.copy_(tokens)
        for sequence in filter(None, sequences):
            sequence.drawn += 1
            if sequence.drawn == self.uniform.size(1):
                self._release(sequence)
        return Step(sequences, host, arrived)

    def _arrived(self, step: Step) -> Drawn:
        """Wait for a step's tokens and hand them to their sequences; one that stops leaves its row."""
        if step.arrived:
            step.arrived.synchronize()
        drawn = []
        for sequence, token in zip(step.sequences, step.tokens.tolist(), strict=True):
            if sequence and not sequence.stopped:  # a stopped one had a token more before the host knew
                sequence.new.append(token)
                drawn.append((sequence.number, token))
                if token == self.stop_token:
                    sequence.stopped = True
                    if sequence in self.sequence_of:
                        self._release(sequence)
        return drawn

    def _release(self, sequence: Continued) -> None:
        row = self.sequence_of.index(sequence)
        self.sequence_of[row] = None
        self.cache.free(row)
