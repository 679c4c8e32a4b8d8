"""Where a step's time goes: a few steps recorded with torch.profiler, and the trace summed by part and by kernel.

`region("forward")` is a range in the recorded trace and, on CUDA, an NVTX range, so Nsight Systems shows the same
names without this recorder: `nsys profile -t cuda,nvtx python train.py ...`.

On a GPU the unit is a kernel, a copy or a fill, and idle is the time in which none ran. Without a GPU it is a PyTorch
operator's own time (without the operators that it called), and idle is Python between operators. A kernel that was
launched in the region "optimizer" belongs to the optimizer. A kernel of ours belongs where kernels/parts.py says. For
any other, its name or that of the operator that launched it decides.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from kernels.parts import PART_OF_KERNEL
from training.hardware import Hardware
from training.provenance import provenance

SKIPPED_STEPS = 3  # compilation and the first allocations
WARMUP_STEPS = 1  # with the profiler on, not kept: its own start is slow
RECORDED_STEPS = 3  # enough for a mean; a trace of GPT-2 124M grows by about 1 MB a step
STEPS_NEEDED = SKIPPED_STEPS + WARMUP_STEPS + RECORDED_STEPS

# The first pattern that matches decides. A name is "operator | kernel" in lower case; compiled kernels are named after
# what was fused into them, for example triton_red_fused__softmax_mul. Batched products (bmm) are attention's, naive or
# of short sequences on a CPU: every other product of the model has one weight for the whole batch.
GROUPS = {
    "optimizer": r"multi_tensor_apply|_foreach|adam|optimizer\.step|clip_grad",
    "cross-entropy": r"cross_entropy|nll_?loss|log_?softmax",
    "attention": r"flashgpt::flash_|flash_attn|pytorch_flash|fmha|sdpa|scaleddotproduct|scaled_dot_product|"
    r"tiledattention|\bbmm\b|baddbmm|bmmbackward",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|aten::(mm|addmm|matmul|linear)\b|\b(add)?mmbackward",
    "softmax and normalisation": r"softmax|norm|rsqrt|logsumexp|amax|masked_fill|triton_(per|red)_",
    "memory copies": r"memcpy|memset|copy|aten::(cat|fill_|zero_|clone|contiguous|empty\w*)\b|fillfunctor|catarray",
}
OTHER, IDLE = "other", "idle"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
TOP = 12  # rows of the kernel table
WIDTH = 56  # characters of a name there
TEXT = ("group", "longest", "name")  # columns of words


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name a part of a step; it costs a few microseconds, whether or not a profiler records."""
    nvtx = torch.cuda.is_initialized()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


def refuse_too_few(steps: int) -> None:
    """Raise ValueError if the `steps` that are left to run are too few to record any."""
    if steps < STEPS_NEEDED:
        raise ValueError(
            f"profile=true needs {STEPS_NEEDED} steps ({SKIPPED_STEPS + WARMUP_STEPS} to settle, {RECORDED_STEPS} "
            f"to record) and there are {steps}; raise train.steps, or use profile=false"
        )


class StepProfiler:
    """Open with `with` and call `step()` after each training step; the three steps after the first four are recorded.

    `folder` gets `trace.json.gz`, for https://ui.perfetto.dev or chrome://tracing, and `profile.json`, the time by
    group and by kernel, which is printed too. Recording changes no number of the run. If a profile cannot be made, a
    line says so and the run continues.
    """

    def __init__(self, folder: Path, hardware: Hardware, console: Console):
        self.folder, self._hardware, self._console = folder, hardware, console
        self._steps_done = 0
        on_cuda = hardware.device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
            schedule=schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=RECORDED_STEPS, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # else it warns each time that events of earlier cycles are dropped: there is one cycle
        )

    def __enter__(self) -> "StepProfiler":
        self._profile.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._profile.stop()

    def step(self) -> bool:
        """Mark the end of a training step; return whether the recording has just ended and been written."""
        self._steps_done += 1
        if self._steps_done == SKIPPED_STEPS + WARMUP_STEPS:
            self._hardware.synchronize()  # or kernels of earlier steps would still be running when recording begins
        self._profile.step()
        return self._steps_done == STEPS_NEEDED

    def _write(self, recorded: profile) -> None:
        path = self.folder / "trace.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            found = read_trace(path)
            report = {"provenance": provenance(), "hardware": self._hardware.description, **asdict(found)}
            (self.folder / "profile.json").write_text(json.dumps(report, indent=2) + "\n")
        except (OSError, ValueError) as error:  # a full disk, or a driver that forbids profiling
            self._console.print(f"not profiled: {self.folder}: {error}; the run goes on", soft_wrap=True)
            return
        for table in found.tables():
            self._console.print(table)
        self._console.print(f"the whole trace: {path} (open it at https://ui.perfetto.dev)", soft_wrap=True)


# --- reading the trace


@dataclass(frozen=True)
class Span:
    """A named span of time; start and duration in microseconds."""

    name: str
    group: str
    start: float
    duration: float


@dataclass(frozen=True)
class Share:
    """The time that a kernel, or a group of them, takes of one step."""

    name: str
    group: str
    ms: float
    share: float  # of the step
    calls: float  # per step


@dataclass(frozen=True)
class Profile:
    unit: str  # "GPU kernels" or "CPU operators"
    steps: int
    step_ms: float
    groups: list[Share]  # in the order of GROUPS, then other and idle
    kernels: list[Share]  # the longest first

    def tables(self) -> list[Table]:
        """Time by group, and the longest kernels."""
        groups = Table(title=f"where a step's {self.step_ms:,.1f} ms go ({self.unit}, mean of {self.steps} steps)")
        for column in ("group", "ms", "share", "calls", "longest"):
            # only the last column gives way on a narrow terminal
            groups.add_column(column, justify="left" if column in TEXT else "right", no_wrap=column != "longest")
        for row in self.groups:
            longest = next((short(k.name) for k in self.kernels if k.group == row.group), "")
            groups.add_row(row.name, f"{row.ms:,.2f}", f"{row.share:.1%}", f"{row.calls:,.0f}", longest)
        groups.caption = "a softmax needs about 5 FLOPs a score; the two products around it 4 x head_dim"
        kernels = Table(title=f"the longest {self.unit}")
        for column in ("ms", "share", "calls", "group", "name"):
            kernels.add_column(column, justify="left" if column in TEXT else "right", no_wrap=column != "name")
        for row in self.kernels[:TOP]:
            kernels.add_row(f"{row.ms:,.2f}", f"{row.share:.1%}", f"{row.calls:,.0f}", row.group, short(row.name))
        return [groups, kernels]


def read_trace(path: Path) -> Profile:
    """Time by group and by kernel from a gzipped Chrome trace of whole steps.

    Raises:
        ValueError: the trace holds no recorded step, or says it had a GPU and holds no kernel.
    """
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    recorded = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    if not recorded:
        raise ValueError(f"{path} holds no recorded step; it must be written by torch.profiler with a schedule")
    device = [event for event in events if event.get("cat") in ON_GPU]
    launches = any(event.get("cat") in ("cuda_runtime", "cuda_driver") for event in events)
    if launches and not device:
        raise ValueError(
            f"{path} holds launches and no GPU kernel: the driver lets CUPTI count nothing on this machine"
        )
    if device:
        unit, spans = "GPU kernels", _kernels(events, device)
        begin, end = min(s.start for s in spans), max(s.start + s.duration for s in spans)
    else:
        unit = "CPU operators"
        spans = [Span(op["name"], group, op["ts"], own) for op, own, group in _operators(events)]
        begin, end = min(e["ts"] for e in recorded), max(e["ts"] + e["dur"] for e in recorded)
    idle = (end - begin) - (_covered(spans) if device else sum(span.duration for span in spans))
    return _summary(unit, spans, end - begin, idle, len(recorded))


def group_of(name: str) -> str:
    """The group of "operator | kernel": one of GROUPS, or OTHER."""
    part = PART_OF_KERNEL.get(name.rpartition(" | ")[2])
    if part is not None:
        return part if part in GROUPS else OTHER
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name.lower())), OTHER)


def short(name: str) -> str:
    """A kernel's name without return type, filler namespaces and template arguments."""
    name = re.sub(r"\(anonymous namespace\)::|^void |at::native::", "", name)
    inner = re.search(r"(\w*(?:functor|_kernel_cuda|kernel_?impl)\w*)", name, flags=re.I)
    outer = re.split(r"[<(]", name)[0]
    if inner and "elementwise" in outer:  # the name says how it loops; what it computes is in its arguments
        outer = inner[1]
    return outer if len(outer) <= WIDTH else outer[: WIDTH - 1] + "…"


def _kernels(events: list[dict], device: list[dict]) -> list[Span]:
    """Each kernel, grouped with the help of the operator and the region that launched it."""
    operators = {op["args"]["External id"]: (op["name"], group) for op, _, group in _operators(events)}
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    in_optimizer = _regions(events, "optimizer")
    spans = []
    for event in device:
        arguments = event.get("args", {})
        operator, inherited = operators.get(arguments.get("External id"), ("", OTHER))
        group = group_of(f"{operator} | {event['name']}")
        if in_optimizer(launched.get(arguments.get("correlation"), -1.0)):
            group = "optimizer"
        spans.append(Span(event["name"], inherited if group == OTHER else group, event["ts"], event["dur"]))
    return spans


def _operators(events: list[dict]) -> Iterator[tuple[dict, float, str]]:
    """Each operator, its own time (without the operators it called) and its group.

    One whose name matches no group is counted with the operator that called it: a subtraction inside logsumexp, say.
    """
    in_optimizer = _regions(events, "optimizer")
    threads: dict[int, list[dict]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    for ops in threads.values():
        ops.sort(key=lambda e: (e["ts"], -e["dur"]))
        own, groups = [op["dur"] for op in ops], [group_of(op["name"]) for op in ops]
        callers: list[int] = []  # operators that still run, outermost first
        for number, op in enumerate(ops):
            while callers and ops[callers[-1]]["ts"] + ops[callers[-1]]["dur"] <= op["ts"]:
                callers.pop()
            if callers:
                own[callers[-1]] -= op["dur"]
                groups[number] = groups[callers[-1]] if groups[number] == OTHER else groups[number]
            if in_optimizer(op["ts"]):
                groups[number] = "optimizer"
            callers.append(number)
        yield from zip(ops, (max(duration, 0.0) for duration in own), groups, strict=True)


def _regions(events: list[dict], name: str):
    """Return a function of a time that says whether it is inside a region of that name."""
    found = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation" and e["name"] == name]
    return lambda moment: any(begin <= moment < end for begin, end in found)


def _covered(spans: list[Span]) -> float:
    """Time in which at least one span runs: kernels of several streams overlap."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        end = span.start + span.duration
        total += max(0.0, end - max(span.start, until))
        until = max(until, end)
    return total


def _summary(unit: str, spans: list[Span], window: float, idle: float, steps: int) -> Profile:
    def share(name: str, group: str, durations: list[float]) -> Share:
        spent = sum(durations)
        return Share(name, group, spent / steps / 1e3, spent / window, len(durations) / steps)

    by_group: dict[str, list[float]] = defaultdict(list)
    by_kernel: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        by_group[span.group].append(span.duration)
        by_kernel[span.name, span.group].append(span.duration)
    groups = [share(group, group, by_group[group]) for group in (*GROUPS, OTHER)]
    groups.append(Share(IDLE, IDLE, idle / steps / 1e3, idle / window, 0))
    kernels = [share(name, group, durations) for (name, group), durations in by_kernel.items()]
    kernels.sort(key=lambda k: -k.ms)
    return Profile(unit, steps, window / steps / 1e3, groups, kernels)
