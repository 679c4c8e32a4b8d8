"""The house: who may import whom, how long a file may get, what must not be there."""

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_grows_past_the_ceiling(path):
    lines = len(path.read_text().splitlines())
    assert lines <= CEILING or path.name.startswith("test_") or "hopper" in str(path), f"{lines} lines"


def test_every_room_is_a_regular_package():
    """Without __init__.py a same-named installed package wins; `kernels` exists on the package index."""
    assert all((ROOT / name / "__init__.py").is_file() for name in ROOMS)
    installed = {d.metadata["Name"].lower() for d in metadata.distributions()}
    assert not installed & {"kernels", "flashgpt"}


def test_readme_names_only_what_exists():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in re.findall(r"`((?:conf|data|kernels|model|scripts|tests|training)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:scripts|data|tests)(?:\.\w+)+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for experiment in re.findall(r"experiment=(\w+)", text):
        assert (ROOT / "conf" / "experiment" / f"{experiment}.yaml").is_file(), experiment
