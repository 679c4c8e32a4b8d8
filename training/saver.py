"""What the loop calls to save: one checkpoint after another, and a failure that does not end the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from training import checkpoint as checkpoints


class Saver:
    """Writes a run's checkpoints to `folder` and deletes those that need not be kept.

    A checkpoint that cannot be written (full disk, folder read-only or gone) is reported through `say` and the run
    goes on: the checkpoints before it are whole, and the next save tries again. `close` raises OSError where the very
    last one failed, as then the run's end is lost.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int, say: Callable[[str], None]) -> None:
        self.folder, self._keep_last, self._keep_every, self._say = folder, keep_last, keep_every, say
        self.saved: Path | None = None  # the last one written
        self.error: OSError | None = None  # why the last attempt failed
        checkpoints.prepare(folder)

    def save(self, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], *, best: bool) -> None:
        """Save the model as it is now. state and meta: see `checkpoint.write`."""
        try:
            self.saved = checkpoints.write(self.folder, checkpoints.weights_of(model), state, meta, best=best)
            checkpoints.prune(self.folder, keep_last=self._keep_last, keep_every=self._keep_every)
            self.error = None
        except OSError as error:
            self.error = error
            self._say(
                f"not saved: step {meta['step']} to {self.folder}: {error}; earlier checkpoints are untouched and the "
                "run goes on; free space or make the folder writable before the next save"
            )

    def close(self) -> None:
        if self.error is not None:
            raise OSError(f"the last checkpoint was not saved to {self.folder}: {self.error}") from self.error
