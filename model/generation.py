"""Text generation with continuous batching: many sequences at a time, one token per sequence and step.

Sequences queue for a row of a paged KV cache. Prompts that get a row at the same time are read in one call, end to end
without padding; samples of one prompt share its pages. Every step is then the same work whatever the rows hold, so on a
GPU it is one CUDA graph: the model's call, the choice of tokens, their copy into the next call's input. The host
reads a step's tokens while the next step runs; when a sequence ends, its row goes to the next one in the queue.
"""

import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import needs_dispatcher
from model.attention import flash
from model.cache import EIGHT_BIT_DTYPES, Cache
from model.free_memory import free_host_bytes
from model.generation_state import StepState
from model.gpt import GPT
from model.inference import can_fuse, hooked, is_ours, products_of
from model.prompts import sent
from model.sampling import check_sampling, choose_next_token, whole

PAGE = 128  # tokens: a tile of the decode kernel is in one page
PROMPT_TOKENS = 32768  # read in one call, where there is more than one prompt
ALWAYS_FREE_BYTES = 2**26  # bytes that any machine has free; asking takes a millisecond
Drawn = list[tuple[int, int]]  # (sequence, token)
COMPILED: set[tuple] = set()  # kinds of steps that have run in this process, whose kernels a capture finds compiled


@torch.inference_mode(False)  # the tensors made here are written to later, perhaps outside of inference mode
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
    """Continue prompts of any lengths, yielding tokens as they are drawn.

    When a context reaches the model's seq_len (a model of transformers: its longest), its last half is prefilled again
    and generation continues; of a longer prompt only the last seq_len tokens are read. A sequence's text depends on its
    prompt, the seed, num_samples and the number of its sample, not on the other prompts, up to the rounding of the
    logits. Random numbers come from this call's own generator, and the model is copied to the dtype it would run in now
    (weights already in it are shared), so generating in the middle of training changes nothing. On CUDA a model in eval
    mode whose weights have that dtype and need no gradient keeps the call's CUDA graph for the next call of the same
    sizes and options.

    Args:
        model: of a compiled model the uncompiled one runs.
        prompts: the ids to continue, at least one per prompt; each a list, or a tensor or array of one dimension.
        max_new_tokens: how many tokens to add to each sequence.
        temperature, top_k, top_p: as in `choose_next_token`.
        seed: of the random draws, the same for each prompt.
        num_samples: continuations of each prompt; sequence i is sample i % num_samples of prompt i // num_samples.
        stop_token: a sequence ends once it has drawn this token.
        batch_size: the most sequences that are continued at a time.
        cache_dtype: dtype of keys and values; None: attention's. int8 and float8_e4m3fn take half the memory.

    Yields:
        The tokens that a step, or a prefill of prompts, has drawn: (sequence, token) of each unfinished sequence.

    Raises:
        ValueError: an impossible option or one that memory cannot hold, at the call and not at the first token.
    """
    check_sampling(temperature, top_k, top_p)
    contexts = [ids[-model.seq_len :] for ids in prompt_ids(prompts, model.vocab_size)]
    num_samples, batch_size = whole("num_samples", num_samples, 1), whole("batch_size", batch_size, 1)
    max_new_tokens, seed = whole("max_new_tokens", max_new_tokens, 0), whole("seed", seed, -(2**63))
    stop_token = None if stop_token is None else whole("stop_token", stop_token, -(2**63))
    if cache_dtype not in (None, *EIGHT_BIT_DTYPES.values()):
        raise ValueError(f"cache_dtype={cache_dtype} must be None, torch.int8 or torch.float8_e4m3fn")
    if not contexts or max_new_tokens == 0:
        return iter(())
    if next(model.parameters()).is_meta:
        raise ValueError("the model is on meta, where weights have no numbers; make it on the device to generate on")
    needed = 8 * max_new_tokens * num_samples
    if needed > ALWAYS_FREE_BYTES and (free := free_host_bytes()) is not None and needed > free:
        raise ValueError(
            f"num_samples={num_samples} of max_new_tokens={max_new_tokens} are drawn with {needed / 2**30:.2f} GiB of "
            f"random numbers and {free / 2**30:.2f} GiB are free; use fewer"
        )
    sequences = (  # made only when they begin: there may be many
        Continuation(number * num_samples + sample, sample, context)
        for number, context in enumerate(contexts)
        for sample in range(num_samples)
    )
    draws = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand(max_new_tokens, num_samples, dtype=torch.float64, device="cpu", generator=draws)
    # as Python's numbers: their repr distinguishes captured steps
    choose = partial(
        choose_next_token,
        temperature=float(temperature),
        top_k=None if top_k is None else int(top_k),
        top_p=None if top_p is None else float(top_p),
    )
    if model.config.name is not None:
        if cache_dtype is not None:
            raise ValueError(f"cache_dtype={cache_dtype} is for a GPT of ours; {model.config.name} has its own cache")
        return model.continued(sequences, uniform.T, choose, stop_token)
    longest = min(max(map(len, contexts)) + max_new_tokens, model.seq_len)
    num_rows = min(batch_size, len(contexts) * num_samples)
    with torch.no_grad():
        model = model.for_inference(model.compute_dtype)
        state = StepState.of(model, num_rows, longest, PAGE, cache_dtype, None if temperature == 0 else uniform.T)
    return Generation(model, state, choose, stop_token, max_new_tokens).run(sequences)


def prompt_ids(prompts: Sequence[Sequence[int]], vocab_size: int) -> list[array]:
    """The ids of each prompt, as an array: lists would keep a GPU waiting. Raises ValueError as `generate` does."""
    if not hasattr(prompts, "__iter__"):
        raise ValueError(f"prompts is {prompts!r}; give a list of prompts, each a list of ids")
    found = []
    for number, prompt in enumerate(prompts):
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()  # of a tensor, or of NumPy
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise ValueError(f"prompt {number} is {prompt!r}; give a list of prompts, each a list of ids")
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; give at least one token")
        try:
            # array("q", bytes) would read eight bytes as an id
            found.append(array("q", prompt if type(prompt) is list else iter(prompt)))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"prompt {number} is no list of ids ({error}); give whole numbers") from error
    if found and not in_range(bytearray().join(found), vocab_size):
        number = next(number for number, ids in enumerate(found) if not in_range(ids, vocab_size))
        raise ValueError(f"an id of prompt {number} lies outside 0..{vocab_size - 1}; use the model's tokenizer")
    return found


def in_range(ids: array | bytearray, vocab_size: int) -> bool:
    """Whether all int64 of the buffer are 0 to vocab_size - 1."""
    least, largest = torch.frombuffer(ids, dtype=torch.int64).aminmax()
    return least.item() >= 0 and largest.item() < vocab_size


@dataclass(eq=False)
class Continuation:
    """A sequence that is being generated."""

    number: int
    sample: int  # which sample of its prompt
    context: array  # ids to prefill; samples of a prompt share one array
    new: list[int] = field(default_factory=list)  # tokens generated since, as far as they have reached the host
    drawn: int = 0  # tokens launched on the device
    stopped: bool = False


class Step(NamedTuple):
    """A step's tokens, being copied to the host."""

    sequences: list[Continuation | None]
    tokens: Tensor  # (sequences,) int64 on the host; meaningless where the sequence is None
    arrived: torch.cuda.Event | None


class Generation:
    """The scheduler: which sequence has which row of the cache, and the launch of each step.

    model: in the dtype to run in.
    state: the model's, with no row in use.
    choose: (logits (S, V), uniform (S,), or None where the state has none, out=) -> tokens (S,), as in
        `choose_next_token`.
    stop_token, max_new_tokens: as in `generate`.
    """

    def __init__(
        self,
        model: GPT,
        state: StepState,
        choose: Callable[..., Tensor],
        stop_token: int | None,
        max_new_tokens: int,
    ):
        self.model, self.state, self.cache, self.device = model, state, state.cache, state.device
        self.choose, self.stop_token, self.max_new_tokens = choose, stop_token, max_new_tokens
        self.row_sequences: list[Continuation | None] = [None] * len(self.cache.reserved)
        self.on_cuda = self.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self.device) if self.on_cuda else None  # to the host
        # other attentions, also those of `attend_with`, read lengths on the host; hooks and counters see no replay
        plain = all(can_fuse(block) and block.attention.attend is flash for block in model.blocks)
        plain = plain and is_ours(model) and not hooked(model)
        # inference mode saves a fifth of the host's time for a view or product; but hooks may keep them for a gradient
        self.without_gradient = torch.inference_mode if plain else torch.no_grad
        self.uses_graphs = self.on_cuda and plain and not needs_dispatcher(state.tokens)
        cache, greedy = self.cache, state.uniform is None
        sizes = cache.block_table.shape, cache.keys.shape, model.vocab_size
        self.kind = str((model.config, choose, greedy)), model.compute_dtype, cache.keys.dtype, self.device, *sizes

    def run(self, sequences: Iterator[Continuation]) -> Iterator[Drawn]:
        """Continue the sequences until all have ended or the caller closes the iterator."""
        with suppress(GeneratorExit):
            yield from self._run(sequences)
        if self.state.graph is not None:
            self.state.rest(self.model)

    def _run(self, sequences: Iterator[Continuation]) -> Iterator[Drawn]:
        waiting, in_flight, num_rows = deque(), deque(), len(self.row_sequences)
        while True:
            # one more than there are rows, so that `waiting` is empty only where no sequence is left
            waiting.extend(islice(sequences, max(0, num_rows + 1 - len(waiting))))
            if waiting and None in self.row_sequences:
                in_flight.append(self._read_prompts(waiting))
            if self.state.graph is None:  # the next launch compiles or captures, so yield tokens before it
                yield from self._drain(in_flight, 0)
            rows = [row for row, sequence in enumerate(self.row_sequences) if sequence]
            full = [row for row in rows if self.cache.reserved[row] == self.cache.max_tokens]
            if rows and not full:
                in_flight.append(self._launch(rows))
            elif not in_flight and not waiting and not full:
                return
            yield from self._drain(in_flight, 1 if rows and not full else 0)
            for row in full:  # all of their tokens have arrived
                if sequence := self.row_sequences[row]:
                    self._release([sequence])
                    half = max(1, self.cache.max_tokens // 2)
                    sequence.context, sequence.new = (sequence.context + array("q", sequence.new))[-half:], []
                    waiting.appendleft(sequence)

    def _drain(self, in_flight: deque[Step], left: int) -> Iterator[Drawn]:
        """The tokens of all but the last `left` steps in flight."""
        while len(in_flight) > left:
            if drawn := self._arrived(in_flight.popleft()):
                yield drawn

    @torch.no_grad()
    def _read_prompts(self, waiting: deque[Continuation]) -> Step:
        """Give free rows to waiting sequences, prefill their contexts in one call, draw a token for each."""
        taken: list[tuple[int, Continuation]] = []
        readers: list[int] = []  # rows that prefill; the others are forks of the last reader before them
        reader_of, counts, tokens = [], [], array("q")
        for row in [row for row, sequence in enumerate(self.row_sequences) if sequence is None]:
            if not waiting:
                break
            context = waiting[0].context
            if not taken or context is not taken[-1][1].context:
                if readers and len(tokens) + len(context) > PROMPT_TOKENS:
                    break
                readers.append(row)
                counts.append(len(context))
                tokens += context
            taken.append((row, waiting.popleft()))
            reader_of.append(len(readers) - 1)
        self.cache.allocate(*readers)
        self.cache.extend(readers, counts)
        prompts = self.cache.prompts(readers)
        ids = sent(torch.frombuffer(tokens, dtype=torch.int64), self.device)
        logits = self._logits(ids[None], prompts)[0]  # (readers, V)
        # work that the prompts do not depend on, while a GPU reads them
        state = self.state
        if self.uses_graphs and state.captured != self._graph_key():
            state.graph = None
        about = [(row, sequence.sample, sequence.drawn) for row, sequence in taken]
        about = torch.tensor([*zip(*about, strict=True), reader_of], device="cpu")
        rows, sample, drawn, reader_of_row = sent(about, self.device)
        for (row, _), reader in zip(taken, reader_of, strict=True):
            if row != readers[reader]:
                self.cache.fork(readers[reader], row)
        first = self._draw(logits[reader_of_row], sample, drawn)
        state.sample[rows], state.drawn[rows] = sample, drawn + 1
        self._wait_for_copy()
        state.tokens[rows] = first
        for row, sequence in taken:
            self.row_sequences[row] = sequence
        return self._send(first, [sequence for _, sequence in taken])

    @torch.no_grad()
    def _launch(self, rows: list[int]) -> Step:
        """Launch one more token of each row in use."""
        self.cache.extend(rows, 1)
        state = self.state
        if self.uses_graphs and self.kind in COMPILED:
            if state.graph is None:
                try:
                    state.graph = self._captured()
                except torch.OutOfMemoryError:  # during a capture the allocator frees none of its cached memory
                    torch.cuda.empty_cache()
                    state.graph = self._captured()
                state.captured = self._graph_key()
            state.graph.replay()
            self.cache.count_stored(1)
        else:
            self._step()
            if self.uses_graphs:
                COMPILED.add(self.kind)
        return self._send(state.tokens, list(self.row_sequences))

    def _step(self) -> None:
        """The device's work of a step, the same whatever the rows hold."""
        state = self.state
        logits = self._logits(state.tokens[:, None], self.cache)[:, 0]  # (rows, V)
        self._wait_for_copy()
        self._draw(logits, state.sample, state.drawn, out=state.tokens)
        if state.uniform is not None:
            state.drawn += 1

    def _wait_for_copy(self) -> None:
        """Wait before the newest tokens are overwritten: their copy to the host runs beside later work."""
        if self.state.copied:
            self.state.copied.wait(torch.cuda.current_stream(self.device))

    def _graph_key(self) -> tuple:
        """What captured steps depend on: their operations, and the addresses outside the state that they access.
        `kept` keeps the tensors at these addresses alive, in case the model gets other weights meanwhile."""
        model, cache = self.model, self.cache
        tensors = [model.embedding.weight, model.cos, model.sin, cache.keys, cache.values, *cache.scales]
        tensors += [] if model.head is None else [model.head.weight]
        tensors += [product.weight for block in model.blocks for product in products_of(block)]
        done = [(block.attention.window, block.attention.scale) for block in model.blocks]
        self.kept = tensors
        return self.kind, done, [x.data_ptr() for x in tensors]

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        # cuBLAS keeps a workspace for each stream: the graph gets its own, in its own memory
        torch._C._cuda_clearCublasWorkspaces()
        gc.disable()  # collecting a dead model would free memory, which breaks a capture
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):  # nothing runs on it, so nothing waits for it
                # not torch.cuda.graph, which empties the allocator's cache; other threads may allocate meanwhile
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._step()
                except BaseException:
                    with suppress(RuntimeError):  # it says that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
            torch._C._cuda_clearCublasWorkspaces()
        return graph

    def _logits(self, tokens: Tensor, cache: Cache) -> Tensor:
        with self.without_gradient(), torch.autocast(self.device.type, enabled=False):  # weights have its dtype already
            return self.model(tokens, kv_cache=cache)

    def _draw(self, logits: Tensor, sample: Tensor, drawn: Tensor, out: Tensor | None = None) -> Tensor:
        """A token for each row of logits (S, V); `drawn` of unused rows may be past the last draw, hence the clamp."""
        uniform = self.state.uniform
        if uniform is not None:
            uniform = uniform[sample, drawn.clamp(max=uniform.size(1) - 1)]
        return self.choose(logits, uniform, out=out)

    def _send(self, tokens: Tensor, sequences: list[Continuation | None]) -> Step:
        """Start the copy of the tokens to the host. A sequence whose last token is launched gives up its row."""
        host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=self.on_cuda)
        arrived = None
        if self.copy_stream:
            self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
            tokens.record_stream(self.copy_stream)
            with torch.cuda.stream(self.copy_stream):
                host.copy_(tokens, non_blocking=True)
                arrived = self.copy_stream.record_event()
                self.state.copied.record()
        else:
            host.copy_(tokens)
        for sequence in filter(None, sequences):
            sequence.drawn += 1
        self._release([x for x in filter(None, sequences) if x.drawn == self.max_new_tokens])
        return Step(sequences, host, arrived)

    def _arrived(self, step: Step) -> Drawn:
        """Wait for a step's tokens and append them to their sequences; one that stops gives up its row."""
        if step.arrived:
            step.arrived.synchronize()
        drawn = []
        for sequence, token in zip(step.sequences, step.tokens.tolist(), strict=True):
            if sequence and not sequence.stopped:  # a stopped one has drawn one more before the host saw its stop token
                sequence.new.append(token)
                drawn.append((sequence.number, token))
                if token == self.stop_token:
                    sequence.stopped = True
                    if sequence in self.row_sequences:
                        self._release([sequence])
        return drawn

    def _release(self, sequences: list[Continuation]) -> None:
        rows = [row for row, sequence in enumerate(self.row_sequences) if sequence in sequences]
        for row in rows:
            self.row_sequences[row] = None
        self.cache.free(*rows)
