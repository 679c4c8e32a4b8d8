"""The watchdog of a run of several processes: a thread in each that ends it when one of them dies or hangs.

Each process writes a heartbeat into the store: its step, and how many collectives it has entered. A process without a
heartbeat for long is dead or stopped; one that the others wait for longer than its patience hangs. The thread then says
in one line which rank, step and host it was, and ends its process: the loop itself may be inside a collective operation
that never returns. Checkpoints are whole at any moment, so nothing that was saved is lost.
"""

import json
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

if TYPE_CHECKING:
    from training.parallel import World

EXIT_LOST = 69  # sysexits.h: a service is unavailable
SHOW_CURSOR = "\x1b[?25h"
SAVER = "saver"  # the name of the thread that writes a checkpoint


def wait_for_saves(seconds: float | None = None) -> None:
    """Wait until no checkpoint is being written in this process, or for at most `seconds`."""
    for thread in threading.enumerate():
        if thread.name == SAVER:
            thread.join(seconds)


@dataclass(frozen=True)
class Failure:
    """Why a process ended, or counts as lost."""

    rank: int
    host: str
    step: int  # done by then
    message: str
    code: int = EXIT_LOST  # exit code of the processes that end because of it


@dataclass(frozen=True)
class Limits:
    """In seconds during which this process and the store both run: time in which either is stopped does not count.

    Where a process dies, the collective operations of the others fail at once with gloo, and never with NCCL.
    """

    beat: float = 1.0
    silent: float = 40.0  # without a beat: dead, or stopped by a debugger
    silent_if_suspected: float = 8.0  # after communication failed here, or SIGTERM came
    grace: float = 2.0  # for this process to end by itself, with what it has to say


LIMITS = Limits()


class Watchdog:
    """Starts its threads at once; `stop` it before the process exits."""

    def __init__(self, world: "World", store: dist.Store, limits: Limits) -> None:
        self._world, self._limits = world, limits
        self._store = store.clone()  # a connection of its own: the loop may be waiting in the other one
        self._store.set_timeout(timedelta(seconds=limits.silent))
        self._stopped = threading.Event()
        self._suspicion = ""
        self._looks = 0  # this class's clock: one look each beat
        self._heard = [("", 0)] * world.size  # each rank's last beat, and when it arrived
        self._late = [(0, 0)] * world.size  # each rank's collectives, and since when the others are ahead
        self._beats = 0
        self._beat()
        world.all_gather("watched")  # from here on each has a beat
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="watchdog of the watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def suspect(self, reason: str) -> None:
        """Note an error here that another process's death would explain."""
        self._suspicion = self._suspicion or reason

    def wait_for_the_end(self, reason: str) -> NoReturn:
        """Called where communication failed: wait until the thread finds out why and ends the process."""
        self.suspect(reason)
        self._thread.join(2 * self._limits.silent)
        self._end(Failure(self._world.rank, self._world.hosts[self._world.rank], self._world.step, reason), [])

    def post(self, failure: Failure, silent: Collection[int] = ()) -> None:
        """Tell all why this process ends; the first message counts. The `silent` ranks are not waited for."""
        world = self._world
        with suppress(RuntimeError):  # the store is gone, and the others with it
            self._store.compare_set("failed", "", json.dumps(asdict(failure)))
            if world.is_first:  # the store may run in this process, which then ends only when the others have read that
                others = [f"heard/{rank}" for rank in range(1, world.size) if rank not in silent]
                self._store.wait(others, timedelta(seconds=5 + self._limits.grace))
            else:
                self._store.set(f"heard/{world.rank}", "")

    def _run(self) -> None:
        while not self._stopped.wait(self._limits.beat):
            try:
                found = self._look()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                found = Failure(0, self._world.hosts[0], self._world.step, f"its store is gone ({reason})"), [0]
            if found and not self._stopped.wait(self._limits.grace):
                self.post(*found)
                self._end(*found)

    def _guard(self) -> None:
        """End the process if a look does not return: a call to the store of a stopped process never does."""
        looks = still = 0
        while not self._stopped.wait(self._limits.beat):
            looks, still = self._looks, still + 1 if self._looks == looks else 0
            if still * self._limits.beat > self._limits.silent:
                message = f"its store has not answered for {self._limits.silent:g} s: stopped or cut off"
                self._end(Failure(0, self._world.hosts[0], self._world.step, message), [0])

    def _beat(self) -> None:
        world, self._beats = self._world, self._beats + 1
        text = json.dumps([self._beats, world.step, world.collectives_entered, world.patience])
        self._store.set(f"beat/{world.rank}", text)

    def _look(self) -> tuple[Failure, list[int]] | None:
        """The failure, if there is one, and the ranks that no longer send beats."""
        world, limits, now = self._world, self._limits, self._looks
        self._looks += 1
        self._beat()
        beats = self._store.multi_get([f"beat/{rank}" for rank in range(world.size)])
        for rank, beat in enumerate(beats):
            if beat != self._heard[rank][0]:
                self._heard[rank] = beat, now
        if self._store.check(["failed"]):
            failure = Failure(**json.loads(self._store.get("failed")))
            self._store.set(f"heard/{world.rank}", "")
            return failure, [failure.rank]
        patience = limits.silent_if_suspected if self._suspicion else limits.silent
        silent = [rank for rank, (_, since) in enumerate(self._heard) if (now - since) * limits.beat > patience]
        if silent:
            rank = silent[0]
            step = max(json.loads(self._heard[rank][0])[1], world.step - 1)  # our last sum included its part, too
            message = f"it has not been heard of for {patience:g} s: killed, stopped or cut off"
            return Failure(rank, world.hosts[rank], step, message), silent
        return self._hanging([json.loads(beat) for beat in beats], now)

    def _hanging(self, beats: list[list], now: int) -> tuple[Failure, list[int]] | None:
        """A rank that the others have waited for longer than its patience."""
        furthest = max(collectives_entered for _, _, collectives_entered, _ in beats)
        for rank, (_, step, collectives_entered, patience) in enumerate(beats):
            if collectives_entered == furthest or collectives_entered != self._late[rank][0]:
                self._late[rank] = collectives_entered, now
            elif (now - self._late[rank][1]) * self._limits.beat > patience:
                message = f"the others have waited {patience:g} s for it: it hangs"
                return Failure(rank, self._world.hosts[rank], step, message), []
        return None

    def _end(self, failure: Failure, silent: list[int]) -> NoReturn:
        """Print the failure, in one of the processes that are left, and end this one."""
        wait_for_saves(self._limits.silent / 4)  # a save that is nearly on disk
        said = failure.rank == 0 and failure.code != EXIT_LOST  # the first process printed it before it told the others
        if not said and self._world.rank == min(rank for rank in range(self._world.size) if rank not in silent):
            cursor = SHOW_CURSOR if sys.stdout is not None and sys.stdout.isatty() else ""
            place = f"rank {failure.rank} of {self._world.size} on {failure.host}, after step {failure.step}"
            print(f"{cursor}error: {place}: {' '.join(failure.message.split())}; all end", file=sys.stderr, flush=True)
        os._exit(failure.code)
