"""Record a few steps of a run with torch.profiler, and give the parts of a step the same names everywhere.

`region("forward")` is a range in the recorded trace and, on CUDA, an NVTX range, so Nsight Systems shows the same
names without this recorder: `nsys profile -t cuda,nvtx python train.py ...`. What the recorded trace says about where
the time went is read back from its file by training/trace.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from training.hardware import Hardware
from training.provenance import provenance
from training.trace import read_trace

SKIPPED_STEPS = 3  # compilation and the first allocations
WARMUP_STEPS = 1  # with the profiler on, not kept: its own start is slow
RECORDED_STEPS = 3  # enough for a mean; a trace of GPT-2 124M grows by about 1 MB a step
STEPS_NEEDED = SKIPPED_STEPS + WARMUP_STEPS + RECORDED_STEPS


@contextmanager
def region(name: str) -> Iterator[None]:
    """A named part of a step: a few microseconds, whether or not anybody is recording."""
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
    """ValueError where `steps`, those that are left to run, are too few to record any."""
    if steps < STEPS_NEEDED:
        raise ValueError(
            f"profile=true needs {STEPS_NEEDED} steps ({SKIPPED_STEPS + WARMUP_STEPS} to settle, {RECORDED_STEPS} "
            f"to record) and there are {steps}; raise train.steps"
        )


class StepProfiler:
    """Open with `with` and call `step()` after each training step; the steps after the first four are recorded.

    `folder` gets `trace.json.gz`, for https://ui.perfetto.dev or chrome://tracing, and `profile.json`, the time by
    group and by kernel, which is printed too. Recording changes no number of the run.
    """

    def __init__(self, folder: Path, hardware: Hardware, console: Console):
        self.folder, self._hardware, self._console = folder, hardware, console
        self._steps_done, self._written = 0, False
        on_cuda = hardware.device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
            schedule=schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=RECORDED_STEPS, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,  # else it warns, each time, that events of earlier cycles are dropped: there is one cycle
        )

    def __enter__(self) -> "StepProfiler":
        self._profile.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._profile.stop()

    def step(self) -> bool:
        """Mark the end of a training step; whether its recording was the last and has just been written."""
        self._steps_done += 1
        if self._steps_done == SKIPPED_STEPS + WARMUP_STEPS:
            self._hardware.synchronize()  # or kernels of earlier steps would still be running when recording begins
        already = self._written
        self._profile.step()
        return self._written and not already

    def _write(self, recorded: profile) -> None:
        self._written = True
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "trace.json.gz"
        recorded.export_chrome_trace(str(path))
        found = read_trace(path)
        report = {"provenance": provenance(), "hardware": self._hardware.description, **found.as_dict()}
        (self.folder / "profile.json").write_text(json.dumps(report, indent=2) + "\n")
        for part in found.tables():
            self._console.print(part)
        self._console.print(f"the whole trace: {path} (open it at https://ui.perfetto.dev)", markup=False)
