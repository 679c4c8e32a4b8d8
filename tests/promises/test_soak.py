"""Long runs, short: nothing grows, and what grows is seen. `pytest -m slow tests/promises`: the 20,000 steps."""

import itertools
import json
import mmap
import os
import random
import threading
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train as trainer
from tests.promises import soak
from tests.promises.soak import TINY, SoakSettings, Watched, judge, theil_sen
from tests.runs import settings
from training.watchdog import SAVER

pytestmark = pytest.mark.usefixtures("threads_as_before")

# everything that is done beside the steps, often
SHORT = (
    "train.steps=300", "train.log_every=7", "train.eval_every=20", "train.save_every=25", "train.sample_every=60",
    "soak.samples=60", "soak.warm_up=0.4", "soak.max_slowdown=null",
)  # fmt: skip


def soaked(tmp_path, capsys, *overrides: str) -> dict[str, dict]:
    chosen = settings(*TINY, *overrides, f"data.cache_dir={tmp_path}", schema=SoakSettings, experiment=None)
    try:
        soak.main.__wrapped__(chosen, tmp_path)
        failed = False
    except SystemExit:
        failed = True
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["passes"] is not failed
    assert len(json.loads((tmp_path / "soak.json").read_text())["samples"]) >= chosen.soak.samples
    return {row["name"]: row for row in report["rows"]}


def test_a_short_run_grows_in_nothing(tmp_path, capsys):
    rows = soaked(tmp_path, capsys, *SHORT)
    assert {"host memory", "open files", "threads", "step time"} <= set(rows)
    assert all(row["passes"] for row in rows.values()), rows


def test_what_a_step_leaves_behind_is_seen(tmp_path, capsys, monkeypatch):
    """256 KiB kept at each step and a file left open at every twentieth, in the midst of training."""
    kept, count, real = [], itertools.count(), trainer.lr_factor

    def leaking(*args):
        kept.append(mmap.mmap(-1, 2**18))  # the heap may still have room that other tests have left
        kept[-1].write(b"x" * 2**18)
        if next(count) % 20 == 0:
            kept.append(open("/dev/null"))  # noqa: SIM115
        return real(*args)

    monkeypatch.setattr(trainer, "lr_factor", leaking)
    rows = soaked(tmp_path, capsys, *SHORT)
    for item in kept:
        item.close()
    grown = {name for name, row in rows.items() if not row["passes"]}
    assert {"host memory", "open files"} <= grown <= {"host memory", "open files", "threads"}  # pytest may start one
    assert rows["host memory"]["grew"] == pytest.approx(180 / 4, rel=0.2)  # MiB
    assert rows["open files"]["grew"] == pytest.approx(120 / 20, abs=1)


def test_step_time_is_judged_by_the_medians_of_thirds():
    chosen = settings(
        *TINY, "train.steps=1000", "soak.samples=9", "soak.max_slowdown=1.25", schema=SoakSettings, experiment=None
    )

    def verdict(seconds) -> bool:
        samples = [{"host memory": 0} for _ in range(9)]
        return judge(Watched(steps=list(range(9)), samples=samples, seconds=array("d", seconds)), chosen)[-1]["passes"]

    rng = random.Random(0)
    steady = [0.01 + rng.random() * 0.001 + (1.0 if i % 50 == 0 else 0.0) for i in range(1000)]  # evaluations
    assert verdict(steady)
    assert not verdict([s * (1 + i / 1000) for i, s in enumerate(steady)])


def test_a_thread_that_comes_and_goes_has_not_been_left_behind():
    chosen = settings(
        *TINY, "train.steps=1000", "soak.samples=30", "soak.max_slowdown=null", schema=SoakSettings, experiment=None
    )

    def verdict(threads) -> bool:
        samples = [{"threads": count} for count in threads]
        return judge(Watched(steps=list(range(30)), samples=samples, seconds=array("d", [1.0] * 30)), chosen)[0][
            "passes"
        ]

    assert verdict([5] * 20 + [6] * 9 + [5])
    assert not verdict([5] * 19 + [6] * 11)


def test_what_a_slow_disk_holds_up_has_not_been_left_behind(monkeypatch):
    """A checkpoint's file, which here is closed when somebody waits for its thread."""
    waited, opened, join = threading.Event(), threading.Event(), threading.Thread.join

    def save() -> None:
        with open(os.devnull):
            opened.set()
            waited.wait()

    def joined(self, timeout=None) -> None:
        waited.set()
        join(self, timeout)

    before = soak.look(torch.device("cpu"))
    monkeypatch.setattr(threading.Thread, "join", joined)
    saver = threading.Thread(target=save, name=SAVER)
    saver.start()
    opened.wait()
    seen = Watched()
    try:
        seen(SimpleNamespace(number=1, loss=torch.zeros(())))
    finally:
        saver.join()
    assert seen.samples[0]["open files"] <= before["open files"]  # the system may still list a thread that ended


def test_the_slope_is_not_moved_by_a_few_odd_samples():
    x = np.arange(50.0)
    y = 3.0 * x
    y[::10] += 1e6
    assert theil_sen(x, y) == pytest.approx(3.0)


def test_impossible_soaks_are_refused():
    with pytest.raises(ValueError, match=r"soak\.samples=200 is more than the 160 steps after the warm-up; raise"):
        settings(*TINY, "train.steps=200", schema=SoakSettings, experiment=None)
    for wrong in ("samples=3", "warm_up=1", "max_growth_mib=0", "max_slowdown=0.5"):
        with pytest.raises(ValueError, match=rf"soak\.{wrong.replace('.', '[.]')}"):
            soak.SoakConfig(**{key: float(value) for key, value in [wrong.split("=")]})


@pytest.mark.slow
def test_twenty_thousand_steps_grow_in_nothing(tmp_path, capsys):
    """`pytest -m slow tests/promises`; step time with room for whatever else the machine does."""
    rows = soaked(tmp_path, capsys, "soak.max_slowdown=2")
    assert all(row["passes"] for row in rows.values()), rows
