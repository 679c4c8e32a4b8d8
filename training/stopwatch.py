"""Time spent training, without the time spent watching (evaluation, samples, saving, compilation)."""

import time
from collections.abc import Callable


class Stopwatch:
    """`lap(step)` gives the seconds a step since the last `restart(step)` or lap; None where no step was timed."""

    def __init__(self, synchronize: Callable[[], None], step: int) -> None:
        self._synchronize = synchronize
        self.restart(step)

    def restart(self, step: int) -> None:
        self._synchronize()
        self._since, self._from_step = time.perf_counter(), step

    def lap(self, step: int) -> float | None:
        self._synchronize()
        steps = step - self._from_step
        seconds = (time.perf_counter() - self._since) / steps if steps else None
        self._since, self._from_step = time.perf_counter(), step
        return seconds
