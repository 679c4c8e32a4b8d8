"""Saving in the background: the loop takes a copy, a thread writes it, and a failure does not end the run."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_with_path

from training import checkpoint as checkpoints
from training.parallel import ALONE, NullObject, World
from training.shard import full_tensor
from training.stop import resume_command
from training.watchdog import SAVER

EXIT_UNSAVED = 2  # exit code if a run's end is not on disk, as for any file that cannot be written


class Saver:
    """Writes a run's checkpoints to `folder` in the background and deletes those that need not be kept.

    `save` returns as soon as the tensors are on their way to host memory; on CUDA the loop does not even wait for the
    copies, as the next step's kernels queue behind them. One checkpoint is written at a time: the next `save` waits
    for it. Host memory holds one copy of weights and optimizer state, taken at the first save and used again.

    A checkpoint that cannot be written (full disk, folder read-only or gone) is reported through `say` and the run
    continues: the checkpoints before it are whole, and the next save tries again. The other processes of `world` then
    report it too. Weights that are not finite are not saved either. Use it with `with`, which waits for the last one;
    `check` then raises if that one failed and the end of the run is lost; `error` says why.

    best_loss: the validation loss of the best checkpoint in `folder`; inf if there is none. One that could not be
        written does not count: a later one, which is not as good, may be the best that there is.
    """

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int, say: Callable[[str], None], world: World = ALONE,
        *, best_loss: float = math.inf,
    ) -> None:  # fmt: skip
        self.folder, self._keep_last, self._keep_every, self._say = folder, keep_last, keep_every, say
        self._world, self._best_loss = world, best_loss
        self._saved: Path | None = None
        self.error: OSError | ValueError | None = None  # why the last attempt failed; ValueError: of the weights
        self.ends_for_bad_numbers = False  # the run has reported that: damaged weights are not a second failure
        self._bug: BaseException | None = None  # any other exception of the thread
        self._writing: threading.Thread | None = None
        self._host: dict[tuple, torch.Tensor] = {}  # path in weights and state -> the tensor's copy
        checkpoints.prepare(folder)

    def save(
        self, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], val_loss: float | None = None
    ) -> None:
        """Save the model and `state` as they are now. state and meta: see `checkpoint.write`; val_loss: of now."""
        self._world.suspend_timeout()  # the others wait while the save before is still being written
        self.wait()
        with self._world.communicating():
            weights, state = tree_map_with_path(self._copy, (checkpoints.weights_of(model), state))
        device = next(model.parameters()).device
        copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        # not a daemon: an interpreter that ends waits for what is being written
        self._writing = threading.Thread(target=self._write, args=(weights, state, meta, val_loss, copied), name=SAVER)
        self._writing.start()

    def go_back(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Record that the run has gone on from `checkpoint` and leaves behind those of its folder saved later."""
        try:
            checkpoints.go_back(self.folder, checkpoint)
        except OSError as error:
            self._say(f"not written: {self.folder / checkpoints.WENT_BACK}: {error}; the run goes on")

    def wait(self) -> Path | None:
        """Wait until nothing is being written; return the newest checkpoint that this object wrote."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._bug is not None:
            raise self._bug
        return self._saved

    def check(self) -> None:
        """If the last checkpoint is not on disk, raise OSError, or ValueError where its weights are not finite."""
        self.wait()
        if self.error is None:
            return
        gone = not self.folder.exists()  # with its disk, say: it may come back with its contents
        kind, remedy = OSError, "put the folder back" if gone else "free what is short"
        if isinstance(self.error, ValueError):
            kind, remedy = ValueError, "mend its cause"
        earlier = gone or checkpoints.newest_complete(self.folder, lambda line: None, verify=())
        remedy += f", then {resume_command(self.folder.parent)}" if earlier else " and begin anew"
        raise kind(f"the last checkpoint was not saved to {self.folder} ({self.error}): {remedy}") from self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.wait()

    def _copy(self, place: tuple, value: Any) -> Any:
        """The whole tensor, copied to host memory; any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        value = full_tensor(value)
        copy = self._host.get(place)
        if copy is None or (copy.shape, copy.dtype) != (value.shape, value.dtype):
            # pinned, so that the copy from a GPU is asynchronous
            copy = self._host[place] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return copy.copy_(value.detach(), non_blocking=value.is_cuda)  # the event `copied` covers CUDA alone

    def _write(
        self, weights: dict[str, torch.Tensor], state: Any, meta: dict[str, Any], val_loss: float | None, copied: Any
    ) -> None:
        best_loss = self._best_loss if val_loss is None else min(self._best_loss, val_loss)
        try:
            if copied is not None:
                copied.synchronize()
            if wrong := next((name for name, weight in weights.items() if not is_finite(weight)), None):
                kept = "; earlier checkpoints are untouched, and going on begins with the newest of them"
                kept = kept if checkpoints.newest_complete(self.folder, self._say, verify=()) else ""
                self._say(f"not saved: step {meta['step']}: {wrong} is not finite{kept}")
                self.error = None if self.ends_for_bad_numbers else ValueError(f"{wrong} is not finite")
                return
            meta = meta | ({"best_loss": best_loss} if math.isfinite(best_loss) else {})
            self._saved = checkpoints.write(self.folder, weights, state, meta, best=best_loss < self._best_loss)
            self.error, self._best_loss = None, best_loss
            self._prune()
        except OSError as error:
            self.error, self._world.messages.unsaved = error, meta["step"]
            gone = isinstance(error, FileNotFoundError)  # a disk that is gone, or a folder that was renamed
            remedy = "put the folder back" if gone else "free space or make the folder writable"
            self._say(
                f"not saved: step {meta['step']} to {self.folder}: {error}; earlier checkpoints are untouched and the "
                f"run goes on; {remedy} before the next save"
            )
        except BaseException as error:  # raised again in `wait`
            self._bug = error

    def _prune(self) -> None:
        """Delete old checkpoints; a failure does not make the new one unsaved."""
        try:
            checkpoints.prune(self.folder, keep_last=self._keep_last, keep_every=self._keep_every)
        except OSError as error:
            self._say(f"not deleted: a checkpoint in {self.folder}: {error}; delete it after the run")


def is_finite(x: torch.Tensor) -> bool:
    """Whether all of x is finite, without another tensor of its size: minimum and maximum propagate NaN."""
    return x.numel() == 0 or all(torch.isfinite(bound) for bound in x.aminmax())


class ShardSender(NullObject):
    """Replaces `Saver` in the other processes of `world`: sends their rows of sharded weights to the first one."""

    def __init__(self, world: World) -> None:
        self._world = world

    def save(
        self, model: nn.Module, state: dict[str, Any], meta: dict[str, Any], val_loss: float | None = None
    ) -> None:
        with self._world.communicating():
            for value in tree_leaves((checkpoints.weights_of(model), state)):  # in the order of `Saver`
                full_tensor(value)


def saver_of(
    folder: Path, config: Any, say: Callable[[str], None], world: World, best_loss: float
) -> Saver | ShardSender:
    """What saves a run with `config` (TrainConfig): a `Saver` in the first process, a `ShardSender` in the others."""
    if world.is_first:
        return Saver(folder, config.keep_last, config.keep_every, say, world, best_loss=best_loss)
    return ShardSender(world)
