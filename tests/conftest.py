"""Where the tests run: on the CPU, kernels in Triton's interpreter; with `gpu` in `-m`, on the GPU that there is."""

import contextlib
import copy
import gc
import importlib
import os
import pickle
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

# containers often forbid bytecode, and every process that the suite starts would compile PyTorch's modules again
if sys.dont_write_bytecode:
    sys.pycache_prefix = str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings

from kernels.device import HAS_TRITON

settings.register_profile("no deadline", deadline=None)  # Hypothesis' own is 200 ms, which a busy machine may take
settings.load_profile("no deadline")

if not HAS_TRITON:
    sys.exit("error: the tests run kernels, and Triton is not installed, which is made for Linux; run them there")

# files that start processes and wait for them, in turns with long ones that do not: some worker always computes
FIRST = (
    *("test_parallel.py", "test_bad_input.py", "test_slurm.py", "test_hopper.py", "test_survival.py"),
    *("test_memory.py", "test_train.py", "test_resume.py", "test_wandb.py"),
)

if "PYTEST_XDIST_WORKER" in os.environ:  # one process a core: threads, also of what it starts, would wait in line
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
else:
    torch.set_num_threads(2)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Before anybody looks for a GPU: the suite is the same whether there is one or not, and its workers inherit it."""
    if "gpu" not in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_configure(config):
    # before any test module imports triton: the interpreter is chosen when a kernel is decorated
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and not config.getoption("file_or_dir"):
        compile_a_share(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests import interpreter  # imports Triton

        interpreter.make_quick()


def compile_a_share(worker: int, workers: int) -> None:
    """Import another part of what the tests import first: on a new machine all workers would compile the same.

    Each finds the bytecode of the others' parts when it comes to them. The tests' own modules have their asserts
    rewritten, which takes as long as all else; those of the third part import nothing of the first two.
    """
    parts = [
        ("torch._dynamo", "torch._inductor.compile_fx"),
        ("datasets", "matplotlib.figure", "hypothesis"),
        [f"tests.{file.stem}" for file in sorted(Path(__file__).parent.glob("test_[k-z]*.py"))],
    ]
    for number, part in enumerate(parts):
        if worker == min(number, workers - 1):
            for name in part:
                with contextlib.suppress(pytest.skip.Exception):
                    importlib.import_module(name)


def pytest_xdist_auto_num_workers(config):
    """One more than there are cores, as tests wait for what they start, but at most 16: each takes 1.4 GB. One on a
    GPU, whose memory some tests look at."""
    return 1 if torch.cuda.is_available() else min(len(os.sched_getaffinity(0)) + 1, 16)


def pytest_collection_modifyitems(items):
    """FIRST first; tests marked `gpu` skip themselves, where there is no CUDA device."""
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU and -m gpu")
    for item in items:
        if item.get_closest_marker("gpu"):  # `keywords` has the folder of the checkout, too
            item.add_marker(skip)


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped: a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def runs_leave_out_what_takes_longer_than_they_do():
    """Pictures, which tests/test_curves.py draws, asking git for the same commit, and full garbage collections where
    they free no GPU's memory."""
    from training.provenance import git_commit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.curves.draw_run", lambda run, path: None)
        if commit := git_commit():
            patch.setenv("GIT_COMMIT", commit)
        if not torch.cuda.is_available():
            for module in ("training.curves", "scripts.bench.clock"):
                patch.setattr(f"{module}.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(scope="session", autouse=True)
def what_is_hidden_from_pytorch_is_hidden_from_all(tmp_path_factory):
    """A GPU that `nvidia-smi` lists and PyTorch does not see is a mistake to scripts.doctor."""
    if torch.cuda.is_available():
        yield
        return
    stand_in = tmp_path_factory.mktemp("driver") / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\nexit 1\n")
    stand_in.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
        yield


def folder_of_all_workers(tmp_path_factory) -> Path:
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def forecasts_are_shared(tmp_path_factory):
    """By the processes of the suite and those that its tests start; of a step that nobody has asked of, one is made."""
    from tests.runs import Forecasts

    folder = folder_of_all_workers(tmp_path_factory)
    (folder / "forecasts").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORECASTS", str(folder / "forecasts"))
        patch.setattr("training.memory._PEAKS", Forecasts(folder / "forecasts"))
        yield


@pytest.fixture(scope="session", autouse=True)
def what_is_composed_is_read_and_merged_once():
    """Programs have the same few YAML files and arguments; reading and merging them took most of a run's
    configuration."""
    read, merge, kept = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list, {}

    def a_copy_of(key, make):  # Hydra writes into what it has
        if key not in kept:
            kept[key] = pickle.dumps(make())
        return pickle.loads(kept[key])

    def read_once(self, config_path):
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() != "pkg":
            return read(self, config_path)
        return a_copy_of((source.path, config_path), lambda: read(self, config_path))

    def merge_once(self, defaults, repo):
        if any(source.scheme() == "file" for source in repo.get_sources()):  # a test's own
            return merge(self, defaults, repo)
        schema = pickle.dumps(ConfigStore.instance().repo.get("schema.yaml"))  # the program's
        return a_copy_of((str(defaults), schema), lambda: merge(self, defaults, repo))

    parsed = cache(partial(OverridesParser.parse_rule, OverridesParser.create()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverridesParser, "parse_rule", lambda self, text, rule: copy.copy(parsed(text, rule)))
        patch.setattr(ConfigStore, "__deepcopy__", lambda self, memo: self, raising=False)  # there is only one
        patch.setattr(ConfigRepository, "load_config", read_once)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
        yield


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory, forecasts_are_shared) -> str:
    """A program to start in place of `python`, whose processes have PyTorch when they begin: tests/fork_server.py."""
    from tests.fork_server import stand_in

    return str(stand_in(folder_of_all_workers(tmp_path_factory) / "forks"))


@pytest.fixture
def poisoned_memory():
    """Fill memory that `torch.empty` returns with NaN, so that a store which never happens shows."""
    # warnings only: cuBLAS, which the references use on a GPU, would otherwise refuse to run
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def smoke_test(monkeypatch):
    """Benchmarks are run in small, on a CPU, also where there is a GPU and Triton does not interpret."""
    monkeypatch.setattr("scripts.bench.report.interpreting", lambda: True)


@pytest.fixture
def threads_as_before():
    """Runs set PyTorch's threads, and other tests follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread():
    """On a busy machine two threads take many times as long over minute tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gpt2():
    """GPT-2's tokenizer."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("needs TIKTOKEN_CACHE_DIR with GPT-2's vocabulary")
    from data import build_tokenizer

    return build_tokenizer("gpt2")
