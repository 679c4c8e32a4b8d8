"""The house: who may import whom, how long a file may get, what must not be there."""

import ast
import re
import shutil
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from setuptools import build_meta

from tests import conftest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "model", "data", "training", "conf", "scripts", "tests")
SOURCES = [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))] + [ROOT / "train.py"]

# room -> the rooms it may import from (itself always); `train` is train.py
MAY_IMPORT = {
    "kernels": set(),
    "model": {"kernels"},
    "data": set(),
    "training": {"model", "kernels", "data"},
    "conf": {"model", "data", "training"},
    "train": {"conf", "data", "kernels", "model", "training"},
    "scripts": {"conf", "data", "kernels", "model", "training", "train"},
}
# third-party packages that only these places may import
ONLY_IN = {
    "hydra": {"conf", "train", "tests"},
    "omegaconf": {"conf", "train", "tests"},
    "wandb": {"training"},
    "triton": {"kernels", "scripts", "tests"},
    "datasets": {"data", "tests"},
    "transformers": {"model", "scripts", "tests"},  # no dependency: a group of its own
}
# what people read: everything these name exists
PAGES = [page for name in ("README.md", "CONTRIBUTING.md", "*/README.md") for page in sorted(ROOT.glob(name))]
CEILING = 400  # lines; past about 300 a file is probably two ideas


def imports(path: Path) -> set[str]:
    """Top-level names of everything a file imports, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # kernels/ can be lifted out under any name, so it never says its own; everybody else names rooms in full
            if room(path) == "kernels":
                assert node.level or node.module.split(".")[0] != "kernels", f"{path}: names its own package"
            else:
                assert node.level == 0, f"{path}: relative import"
            if node.level == 0:
                names.add(node.module)
    return names


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_directions(path):
    here = room(path)
    for name in imports(path):
        top = name.split(".")[0]
        if top in ROOMS or top == "train":
            allowed = here == "tests" or top == here or top in MAY_IMPORT[here]
            assert allowed, f"{here} must not import {name}"
            if here == top == "scripts":
                program = ROOT / (name.replace(".", "/") + ".py")
                assert "__main__" not in program.read_text(), f"{path}: programs never import one another"
        if top in ONLY_IN:
            assert here in ONLY_IN[top], f"{here} must not import {top}"


def test_no_program_imports_transformers_when_it_starts():
    """What needs it is imported inside functions; without it everything else works, and starts as quickly with it."""
    theirs = {"transformers", "model.huggingface", "model.huggingface_masks", "model.huggingface_model"}
    for path in SOURCES:
        if room(path) != "tests" and f"model.{path.stem}" not in theirs:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    names = {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                else:
                    continue
                assert names.isdisjoint(theirs), f"{path}: {names & theirs}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_grows_past_the_ceiling(path):
    lines = len(path.read_text().splitlines())
    assert lines <= CEILING or path.name.startswith("test_"), f"{lines} lines"


def copies(nodes: list[ast.AST]) -> set[tuple[str, str]]:
    """(x, y) of each assignment x = y of a bare name, alone or one of several."""
    found = set()
    for assignment in (node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Assign)):
        for target in assignment.targets:
            several = isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple)
            xs, ys = (target.elts, assignment.value.elts) if several else ([target], [assignment.value])
            found |= {
                (x.id, y.id) for x, y in zip(xs, ys, strict=True) if isinstance(x, ast.Name) and isinstance(y, ast.Name)
            }
    return found


def lost_in_loops(source: str) -> list[str]:
    """Names of compiled functions that Triton does not carry around a loop: such a name is another one's value when the
    loop begins and takes that one's value of before in it, so to Triton it is not changed. It keeps its first value.
    What an earlier loop leaves is a value of its own."""
    lost = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        if not any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)]
        for loop in loops:
            past = {id(node) for other in loops if other.end_lineno < loop.lineno for node in ast.walk(other)}
            before = [
                node for node in ast.walk(function)
                if isinstance(node, ast.Assign) and node.lineno < loop.lineno and id(node) not in past
            ]  # fmt: skip
            same = {frozenset(pair) for pair in copies(before)}
            lost += [f"{function.name}: {x}" for x, y in copies(loop.body) if frozenset((x, y)) in same]
    return lost


@pytest.mark.parametrize("path", [p for p in SOURCES if room(p) == "kernels"], ids=lambda p: p.stem)
def test_no_name_of_a_kernel_is_lost_in_a_loop(path):
    assert lost_in_loops(path.read_text()) == []


def test_a_name_lost_in_a_loop_is_found():
    kernel = "@gluon.jit\ndef kernel(slope):\n    before{}\n    while 0:\n        before, slope = slope, slope + 1\n"
    assert lost_in_loops(kernel.format(" = slope")) == ["kernel: before"]
    assert lost_in_loops(kernel.format(", turn = slope, 0")) == ["kernel: before"]
    assert lost_in_loops(kernel.format(" = 1 * slope")) == []


def test_every_room_is_a_regular_package():
    """Without __init__.py a same-named installed package wins; `kernels` exists on the package index."""
    assert all((ROOT / name / "__init__.py").is_file() for name in ROOMS)
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    assert "kernels" not in installed


def test_pip_install_brings_the_dependencies_and_none_of_our_rooms(tmp_path, monkeypatch):
    """A user who types `pip install .` runs the programs from the folder: nothing named `data` is on the path."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("data", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(tmp_path / build_meta.build_wheel(str(tmp_path))) as wheel:
        names = wheel.namelist()
        (description,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        needed = wheel.read(description).decode()
    assert all(".dist-info/" in name for name in names), names
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert needed.count("Requires-Dist: ") == len(dependencies)
    assert "Requires-Dist: torch==" in needed


def test_skipped_tests_are_counted_by_reason():
    reasons = ["Skipped: needs a GPU"] * 9 + ["Skipped: needs a file"]
    reports = [SimpleNamespace(longrepr=("test_x.py", 1, reason)) for reason in reasons]
    lines = []
    conftest.pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=lines.append))
    assert lines == ["9 skipped: needs a GPU", "1 skipped: needs a file"]


def test_every_program_is_listed():
    listed = (ROOT / "scripts" / "README.md").read_text()
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "\n@program(" in path.read_text():
            assert re.search(rf"^\| `{module}\b", listed, re.MULTILINE), f"scripts/README.md has no row for {module}"


def test_readme_names_only_what_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in re.findall(r"`((?:conf|data|kernels|model|scripts|tests|training)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:scripts|data|tests)(?:\.\w+)+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for experiment in re.findall(r"experiment=(\w+)", text):
        assert (ROOT / "conf" / "experiment" / f"{experiment}.yaml").is_file(), experiment
