"""The first moments of a program: Ctrl-C while it imports, a full disk, what is missing, modules that are none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf import interrupt
from conf.program import program
from conf.schema import HardwareConfig
from kernels import why_not
from scripts.bench.report import installed_gpus, refuse_without_gpu
from tests.test_text import Echo
from training.provenance import ROOT


@pytest.fixture(autouse=True)
def _in_the_foreground():
    """In a shell's background SIGINT is ignored, by children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def end_of(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess:
    """How Python ends with these arguments where modules in `folder` stand before all others."""
    own = {"PYTHONPATH": str(folder), "HYDRA_FULL_ERROR": "0"}  # programs that tests start here set it
    environment = os.environ | own | variables
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, text=True, capture_output=True)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("asked", ["train.py", "-m scripts.explain", "-m scripts.evidence", "-m scripts.bench.loss"])
def test_ctrl_c_among_the_imports_leaves_without_a_word(asked, ignored, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, *asked.split()], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True,
        capture_output=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3 if ignored else 130, "", "")


@pytest.mark.parametrize("asked", ["train.py", "-m scripts.explain", "-m scripts.bench.loss"])
def test_without_room_for_a_temporary_file_a_program_ends_in_one_line(asked, tmp_path):
    """As on a full disk, or in a container that is read-only; PyTorch could not be imported."""
    (tmp_path / "sitecustomize.py").write_text("import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc']")
    done = end_of(tmp_path, *asked.split())
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: No usable temporary directory found in ['/proc']; make room there, or give TMPDIR a")


def test_a_python_built_without_a_library_is_told_from_a_missing_package(tmp_path):
    """As pyenv builds one where libffi's headers are not installed."""
    for done in ends_of_a_start("raise ModuleNotFoundError('No module named', name='_ctypes')", tmp_path):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {sys.executable} was built without _ctypes; use another Python, as `uv run --m")


def test_a_failure_of_an_import_in_our_own_line_keeps_its_traceback(tmp_path):
    """As with a PyTorch that is too old for a name: the place is what one has to know."""
    for done in ends_of_a_start("", tmp_path):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Traceback ")


def test_a_program_that_needs_no_temporary_file_is_not_refused_for_it(tmp_path):
    """To compare runs no PyTorch is imported."""
    (tmp_path / "sitecustomize.py").write_text("import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc']")
    done = end_of(tmp_path, "-m", "scripts.compare", "--help")
    assert (done.returncode, done.stderr) == (0, "")


WRONG_PYTHONS = {
    "sys.version_info = (3, 10, 6)": (
        f"{sys.executable} is Python 3.10, older than 3.11; begin with `uv run`, or use 3.13"
    ),
    # it has neither fcntl nor SIGUSR1
    "sys.platform = 'win32'": (
        "this runs on Linux and macOS; on Windows use WSL (`wsl --install`), and begin anew there"
    ),
}


@pytest.mark.parametrize("asked", ["train.py", "-m scripts.explain", "-m scripts.bench.loss"])
@pytest.mark.parametrize("found", WRONG_PYTHONS)
def test_a_python_that_is_too_old_or_of_windows_is_named(found, asked, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys\n{found}")
    done = end_of(tmp_path, *asked.split())
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line == f"error: {WRONG_PYTHONS[found]}"


WITHOUT_TRITON = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *other):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *other)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_without_triton_a_run_takes_sdpa(tmp_path):
    """As on macOS, for which there is no Triton, and where its interpreter is asked for in vain."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TRITON)
    macos = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    small = ["model.num_layers=1", "train.steps=1", "train.batch_tokens=256", f"hydra.run.dir={tmp_path / 'run'}"]
    page = end_of(tmp_path, "-m", "scripts.doctor", *small, **macos)
    assert page.returncode == 0
    reason = "flash attention needs Triton, which is not installed and is made for Linux"
    assert f"ok    kernels    not tested: {reason}" in page.stdout
    run = end_of(tmp_path, "train.py", *small, **macos)
    assert run.returncode == 0
    assert "sdpa" in run.stdout
    suite = end_of(tmp_path, "-m", "pytest", "tests/test_conf.py", **macos)
    assert suite.returncode == 1
    assert suite.stderr.startswith("error: the tests run kernels, and Triton is not installed")


def test_the_suite_is_the_same_where_there_is_a_gpu(pytestconfig):
    if "gpu" in pytestconfig.option.markexpr:
        pytest.skip("it is asked for")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert installed_gpus() == []


def test_without_triton_nobody_is_sent_to_its_interpreter(monkeypatch):
    monkeypatch.setattr("kernels.device.HAS_TRITON", False)
    monkeypatch.setattr("kernels.support.HAS_TRITON", False)
    monkeypatch.setattr("scripts.bench.report.HAS_TRITON", False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = why_not("flash", torch.float32, device=torch.device("cpu"), head_dim=64)
    assert reason.startswith(
        "flash attention needs Triton, which is not installed and is made for Linux; use PyTorch's"
    )
    refused = "attention is measured on an NVIDIA GPU and PyTorch sees none; use another"
    with pytest.raises(ValueError, match=refused) as error:
        refuse_without_gpu("attention", HardwareConfig(), "less of it")
    assert "TRITON_INTERPRET" not in str(error.value)


def test_what_names_an_old_python_can_be_read_by_it():
    """Python 3.9 cannot evaluate `FrameType | None`."""
    assert interrupt._leave.__annotations__["frame"] == "FrameType | None"


def ends_of_a_start(torch: str, folder: Path) -> list[subprocess.CompletedProcess]:
    """How a run and a program end where importing PyTorch runs these lines."""
    (folder / "torch.py").write_text(torch)
    return [end_of(folder, *asked.split()) for asked in ("train.py", "-m scripts.explain")]


def test_a_package_that_is_missing_is_named_with_the_way_to_have_it(tmp_path):
    """`python train.py` outside of the environment, as where `uv run` was forgotten."""
    for done in ends_of_a_start("import hydra_missing.core", tmp_path):
        remedy = "begin with `uv run`, or run `pip install .` first"
        line = f"error: hydra_missing is not installed for {sys.executable}; {remedy}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("torch", "says"),
    [
        ("raise ModuleNotFoundError('No module', name='torch._C')", "ModuleNotFoundError: No module"),
        ("raise ImportError('libc10.so: no such file', name='torch._C')", "ImportError: libc10.so: no such file"),
        ("raise ValueError('libcudart.so\\n' * 99)", "ValueError: libcudart.so libcudart.so "),  # what PyTorch raises
    ],
)
def test_a_package_that_is_damaged_is_not_said_to_be_missing(torch, says, tmp_path):
    for done in ends_of_a_start(torch, tmp_path):
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: torch cannot be loaded ({says}")
        assert line.endswith("); where it is damaged, `uv sync --reinstall` mends it")
        assert len(line) < 300


def test_what_is_missing_of_ours_is_a_traceback(tmp_path):
    """Python was told not to look here, which no installation changes."""
    for done in ends_of_a_start("raise ModuleNotFoundError('No module named', name='conf')", tmp_path):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("Traceback ")


def test_ctrl_c_after_the_imports_is_an_exception_again(tmp_path, monkeypatch):
    @program("tool", Echo, run_dir="echoes")
    def main(settings: Echo, run_dir: Path) -> None:
        (run_dir / "made").touch()
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            (run_dir / "made").unlink()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["echo.py"])
    interrupt.leave_quietly()
    try:
        with pytest.raises(SystemExit) as left:
            main()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "a second one would be a traceback"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left.value.code == 130
    assert not any(Path("echoes").iterdir())


def test_a_ctrl_c_that_was_ignored_stays_so():
    """As in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt.leave_quietly()
    interrupt.raise_again()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("asked", [("-m", "scripts.causality"), ("-u", "-mscripts.bench.clock", "-m", "a b")])
def test_a_part_says_that_it_is_no_program(asked):
    done = subprocess.run([sys.executable, *asked], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(" is a part of programs and none itself; scripts/README.md lists them")
