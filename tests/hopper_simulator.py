"""The Hopper kernels' source run by Python: one thread a partition, numpy for tensors, real mbarriers. No GPU.

Gluon has no interpreter. This is enough of one to hold forward and backward to the oracle where there is no GPU: which
tiles are visited, masks, phases and counts of barriers (a partition that waits for ever is reported), the coordinates
of every copy, turns that programs wait for. TMA addresses memory as the hardware does, 64-bit arithmetic and bounds
included. A product reads its operands as late as it may, when it is waited for; so does a copy out. What is written or
added to global memory is seen when its partition ends, or when a turn is passed on by a partition that met the writing
one at a barrier. Layouts, registers, rounding to the inputs' 16 bits and time do not exist here.
"""

import operator
import os
import threading
import types
from functools import partial
from random import Random
from types import SimpleNamespace

import numpy as np
from torch import Tensor
from triton.experimental.gluon import language as gluon_language

import kernels.launch
from tests.hopper_memory import Descriptor, Int, Pointer, Shared, Tile, as_value, flat, load_by_pointer, write_rows

_PATIENCE_S = 20.0  # a barrier is passed within milliseconds or never


class _Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all bytes that were announced have come."""

    def __init__(self, machine):
        self._machine, self._phase, self._arrived, self._bytes = machine, 0, 0, 0
        self.copies = []  # by pointer, without which a phase does not end

    def init(self, count):
        self._count = count

    def change(self, arrived=0, announced=0):
        self._machine.pause()
        with self._machine.changed:
            self._arrived += arrived
            self._bytes += announced
            if arrived:
                self._machine.leave(id(self))
            assert self._arrived <= self._count
            if self._arrived == self._count and self._bytes == 0:
                self._phase, self._arrived = self._phase ^ 1, 0
                _finish(self.copies)
                self._machine.changed.notify_all()

    def wait(self, phase, pred=True):
        if pred:
            self._machine.wait_until(lambda: self._phase != phase)
            self._machine.take(id(self))


_MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: "barriers",
    init=lambda barrier, count: barrier.init(count),
    wait=lambda barrier, phase, pred=True: barrier.wait(phase, pred),
    arrive=lambda barrier, count: barrier.change(arrived=count),
    expect=lambda barrier, size: barrier.change(arrived=1, announced=size),
)


class _InFlight(threading.local):
    """What a thread has started: products, copies out that have not read their tile; and what it must yet write."""

    def __init__(self):
        self.products, self.unread, self.unwritten = [], [], []  # unwritten: functions
        self.copies = []  # by pointer
        self.taken = []  # what others had not written when they arrived at a barrier
        self.waited = False  # for the launch before


class _Machine:
    """One program: its threads, barriers, what is in flight. It stands for the module hopper/tma.py too."""

    def __init__(
        self,
        program: int,
        programs: int,
        element_bytes: int,
        memory: threading.Condition,
        pauses: Random | None,
    ):
        self.program, self.programs = program, programs
        self._element_bytes = element_bytes
        self._memory = memory  # of all programs: tells of a turn passed on
        self._pauses = pauses
        self.changed = threading.Condition()
        self._named, self._unwritten = {}, {}  # threads that came to a hardware barrier, and what they must yet write
        self._own = _InFlight()
        self._stopped = False

    def pause(self):
        """Let other threads go first, or not."""
        if self._pauses:
            for _ in range(int(self._pauses.expovariate(0.2))):
                os.sched_yield()

    def wait_until(self, true):
        with self.changed:
            assert self.changed.wait_for(lambda: true() or self._stopped, _PATIENCE_S), "waits for ever"
            assert not self._stopped, "another partition failed"

    def wait_turn(self, counter, turn, reached=operator.eq):
        now = lambda: counter.memory[counter.offset]  # noqa: E731
        with self._memory:
            came = self._memory.wait_for(lambda: reached(now(), turn) or self._stopped, _PATIENCE_S)
            assert came, f"waits for ever: turn {turn} of query tile {counter.offset}, which stands at {now()}"
            assert not self._stopped, "another partition failed"

    def wait_count(self, counter, count):
        self.wait_turn(counter, count, lambda now, count: now == 0 or now >= count)

    def pass_turn(self, counter):
        self.store_wait(0)
        with self._memory:
            self._complete()
            counter.memory[counter.offset] += 1
            self._memory.notify_all()

    def warp_specialize(self, partitions, *_):
        problems = []

        def run(function, arguments):
            try:
                with np.errstate(all="ignore"):  # a thread's own
                    function(*arguments)
                assert not self._own.products, "ended with a product that nobody waited for"
                assert not self._own.unread + self._own.copies, "ended with a copy that nobody waited for"
                self._complete()
            except Exception as problem:  # carried over to the thread that started this one
                problems.append(problem)
                self._stopped = True
                for condition in (self.changed, self._memory):
                    with condition:
                        condition.notify_all()

        _run_beside([threading.Thread(target=run, args=partition) for partition in partitions], problems)
        for unwritten in self._unwritten.values():  # left by those who arrived last, where nobody waited
            self._own.unwritten += unwritten
        self._complete()

    def allocate(self, dtype, shape, layout):
        if layout == "barriers":
            barriers = [_Barrier(self) for _ in range(shape[0])]
            return SimpleNamespace(index=barriers.__getitem__) if len(shape) == 2 else barriers[0]
        if dtype == "int32":
            return Shared(np.full(shape, -1), 4)
        element_bytes = 4 if dtype == "float32" else self._element_bytes
        return Shared(np.full(shape, np.nan, np.float32), element_bytes)

    def load(self, descriptor, coordinates, barrier, shared):
        tile = shared.array.reshape(-1, shared.array.shape[-1])
        tile[:] = 0.0
        for target, source in zip(tile, descriptor.rows(coordinates), strict=True):
            if source is not None:
                source = source.view(np.int16) if source.itemsize == 1 else source
                target[: len(source)] = source
        barrier.change(announced=-tile.size * shared.element_bytes)

    def store(self, descriptor, coordinates, shared):
        self._own.unread.append((descriptor, coordinates, shared))

    def store_wait(self, pending):
        while len(self._own.unread) > pending:
            descriptor, coordinates, shared = self._own.unread.pop(0)
            tile = shared.array.reshape(-1, shared.array.shape[-1]).copy()
            self._own.unwritten.append(partial(write_rows, tile, list(descriptor.rows(coordinates))))

    def store_by_pointer(self, pointer, value, mask=True):
        offset = np.asarray(pointer.offset)
        inside = np.broadcast_to(mask, offset.shape)
        write = partial(pointer.memory.__setitem__, offset[inside], np.broadcast_to(value, offset.shape)[inside].copy())
        self._own.unwritten.append(write)

    def atomic_add(self, pointer, value, sem, scope="gpu"):
        if isinstance(pointer.offset, int):  # a counter
            with self._memory:
                if sem != "relaxed":
                    self._complete()
                before = Int(pointer.memory[pointer.offset])
                pointer.memory[pointer.offset] += value
                self._memory.notify_all()
            return before
        assert (sem, scope) == ("relaxed", "gpu"), "the order is the barrier's and the turn's"
        self._own.unwritten.append(partial(np.add.at, pointer.memory, pointer.offset, value.copy()))

    def _complete(self):
        _finish(self._own.taken)
        _finish(self._own.unwritten)

    def named_barrier(self, instruction, identifier, threads, warps=4):
        with self.changed:
            meeting = self._named[identifier] = self._named.get(identifier, 0) + 32 * warps
            self.leave(identifier)
            self.changed.notify_all()
        if instruction == "bar.sync":
            whole = -(-meeting // threads) * threads
            self.wait_until(lambda: self._named[identifier] >= whole)
            self.take(identifier)

    def gather(self, pointers, keep, shared):
        self._own.copies.append(lambda: shared.store(load_by_pointer(pointers, mask=keep, other=0.0)))

    def wait_for_gathers(self):
        _finish(self._own.copies)

    def arrive_when_gathered(self, barrier):
        barrier.copies += self._own.copies
        self._own.copies.clear()

    def fence_async_global(self):
        _finish(self._own.unwritten)

    def let_next_begin(self):
        assert self._own.waited, "the next kernel would begin before the one before this has ended"

    def wait_for_previous(self):
        self._own.waited = True

    def leave(self, barrier):
        """What this thread has written is now for those who pass the barrier to tell of; the caller holds the lock."""
        self._unwritten.setdefault(barrier, []).extend(self._own.unwritten)
        self._own.unwritten.clear()

    def take(self, barrier):
        with self.changed:
            self._own.taken += self._unwritten.pop(barrier, [])

    def multiply(self, left, right, acc, use_acc=True, is_async=False):
        result = np.full(acc.shape, np.nan, np.float32).view(Tile)

        def finish():
            a = left.array if isinstance(left, Shared) else left
            # no BLAS: its own threads would wait for ours
            result[:] = np.einsum("ij,jk->ik", a, right.array) + (acc if use_acc else 0.0)

        self._own.products.append(finish)
        return result

    def wait_products(self, pending, deps):
        while len(self._own.products) > pending:
            self._own.products.pop(0)()
        return deps[0] if len(deps) == 1 else deps


def _language(machine) -> SimpleNamespace:
    """`gl` and `tl`."""
    passed = lambda x, *_: x  # noqa: E731
    own = {
        name: (lambda *a, _f=function: as_value(_f(*a)))
        for name, function in {
            "minimum": np.fmin, "maximum": np.fmax, "where": np.where, "exp2": np.exp2, "log2": np.log2,
            "sum": np.sum, "max": np.fmax.reduce, "abs": np.abs, "cumsum": np.cumsum, "reshape": np.reshape,
            "permute": np.transpose, "expand_dims": np.expand_dims, "rsqrt": lambda x: 1.0 / np.sqrt(x),
            "cdiv": lambda a, b: -(-a // b), "join": lambda a, b: np.stack((a, b), -1),
        }.items()
    }  # fmt: skip
    return SimpleNamespace(
        **own,
        program_id=lambda _: machine.program, num_programs=lambda _: machine.programs,
        arange=lambda start, end, layout=None: as_value(np.arange(start, end)),
        zeros=lambda shape, *_: np.zeros(shape, np.float32).view(Tile),
        full=lambda shape, value, dtype, *_: np.full(shape, value, dtype).view(Tile),
        load=load_by_pointer, store=machine.store_by_pointer, atomic_add=machine.atomic_add, convert_layout=passed,
        static_range=range, constexpr=passed, debug_barrier=lambda: None, thread_barrier=lambda: None,
        inline_asm_elementwise=lambda asm, *a, **_: as_value(1.0 / _only_reciprocal(asm, *a)),
        allocate_shared_memory=machine.allocate, warp_specialize=machine.warp_specialize,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda *_: "tile"),
        **dict.fromkeys(
            ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "DistributedLinearLayout"),
            passed,
        ),
        SwizzledSharedLayout=lambda *_, **__: "tile", split=lambda x: (x[..., 0], x[..., 1]),
        math=SimpleNamespace(div_rn=np.divide), **dict.fromkeys(("int64", "bfloat16")),
        **{name: name for name in ("float32", "float16", "int32", "int16", "int8", "float8e4nv")},
    )  # fmt: skip


HIDDEN = {"0fFF800000": -np.inf, "0f00000000": 0.0}  # of `where_bit`


def _finish(pending: list):
    for what in pending:
        what()
    pending.clear()


def _bytes(words):
    """The lower and the upper number of 8 bits in words of two."""
    words = words.astype(np.int16)
    return words.astype(np.int8).astype(np.float32).view(Tile), (words >> 8).astype(np.float32).view(Tile)


def _only_reciprocal(asm, _constraints, operands):
    assert asm.startswith("rcp.")
    return operands[0]


def _python(function, machine, made: dict):
    """A jit function as a Python function whose globals are this machine's."""
    source = function.fn
    if source.__module__ not in made:
        made[source.__module__] = names = dict(source.__globals__)
        language = _language(machine)
        ours = {
            "gl": language, "tl": language, "fence_async_shared": lambda: None,
            "tma": machine, "mbarrier": _MBARRIER,
            "warpgroup_mma": machine.multiply, "warpgroup_mma_wait": machine.wait_products,
            "where_bit": lambda values, words, bits, hidden: np.where(words & bits != 0, values, HIDDEN[hidden]),
            **dict.fromkeys(("pack", "unpack", "_pack", "_unpack"), lambda values, *_: values),
            "widened": lambda words, *_: _bytes(words),
        }  # fmt: skip
        for name, value in names.items():
            if name in ours:
                names[name] = ours[name]
            elif hasattr(value, "fn"):
                names[name] = _python(value, machine, made)
            elif isinstance(value, gluon_language.constexpr):
                names[name] = value.value
    return types.FunctionType(source.__code__, made[source.__module__], source.__name__, source.__defaults__)


def on_device(argument):
    if hasattr(argument, "block_shape"):
        return Descriptor(argument)
    if isinstance(argument, Tensor):
        return Pointer(flat(argument), argument.storage_offset())
    if isinstance(argument, tuple):
        return type(argument)(*map(on_device, argument))
    return Int(argument) if isinstance(argument, int) else argument


def launch(
    kernel,
    grid: int,
    arguments: tuple,
    constants: dict,
    *,
    element_bytes: int = 2,
    residents: int = 1,
    pauses: Random | None = None,
    **_how,
) -> None:
    """`kernels.launch.launch` on tensors of the CPU in float32.

    element_bytes: those that the kernel expects of an element that it loads. residents: how many programs run at a
    time; the next begins when one has ended. pauses: threads let others go first at random.
    """
    arguments = [on_device(x) for x in arguments]
    memory, programs, problems = threading.Condition(), iter(range(grid)), []

    def multiprocessor():
        for program in programs:
            try:
                with np.errstate(all="ignore"):
                    machine = _Machine(Int(program), Int(grid), element_bytes, memory, pauses)
                    _python(kernel, machine, {})(*arguments, **constants)
            except Exception as problem:  # carried over to the thread that launched
                problems.append(problem)
                return

    _run_beside([threading.Thread(target=multiprocessor) for _ in range(residents)], problems)


def call(function, *arguments):
    """What one function of a kernel returns, for a grid of one program."""
    machine = _Machine(Int(0), Int(1), 2, threading.Condition(), None)
    return _python(function, machine, {})(*map(on_device, arguments))


def simulate(monkeypatch, kernel, **how) -> None:
    """From here on `launch` runs this kernel; Triton's interpreter runs the others."""
    real = kernels.launch.start

    def start(described):
        if described.kernel is not kernel:
            return real(described)
        return described, launch(kernel, described.grid, described.arguments, described.constants, **how)

    monkeypatch.setattr("kernels.launch.start", start)


def _run_beside(threads: list[threading.Thread], problems: list[Exception]) -> None:
    """Run them beside each other to their end, and raise the first problem that they have noted."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
