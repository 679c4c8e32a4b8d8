"""Forged checkpoints: their manifest fits, their contents were written by somebody else.

A forgery is refused in one line before anything is written, or the run can use it. It is never a traceback.
"""

import copy
import io
import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema import Settings
from tests.runs import small_run
from train import train
from training import checkpoint as checkpoints
from training.checkpoint import MANIFEST, META, STATE, WEIGHTS

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = 100_000
SETTINGS = ("model.num_layers=1", "model.n_embd=16", "model.num_heads=1", "train.batch_tokens=32", "train.steps=4")
VALUES = (None, True, -1, 0, 7, 2**70, -(10**400), 0.5, math.nan, math.inf, -math.inf, "", "word", "\ud800", "x" * 9999)
CONTAINERS = ([], {}, [[]], [1, "2"], {"step": 1}, [0] * 700, {"0": {"exp_avg": 1}})
OF_STATE = ((), (3, (1, 2), None), {0: {}}, torch.zeros(()), torch.zeros(3), torch.ones(4, dtype=torch.uint8))
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda tensor: tensor.reshape(-1)[:1].clone(),
    "one dimension more": lambda tensor: tensor[None].clone(),
    "float64": torch.Tensor.double,
    "int32": torch.Tensor.int,
    "complex": lambda tensor: tensor.to(torch.complex64),
    "bool": torch.Tensor.bool,
    "NaN": lambda tensor: torch.full_like(tensor.float(), math.nan),
    "infinite": lambda tensor: torch.full_like(tensor.float(), math.inf),
    "negative": lambda tensor: torch.full_like(tensor.float(), -2.0),
    "huge": lambda tensor: torch.full_like(tensor.float(), 3e38),
    "expanded": lambda tensor: torch.zeros(()).expand(tensor.shape),
    "transposed": lambda tensor: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor,
    "sparse": lambda tensor: tensor.float().to_sparse() if tensor.ndim else tensor,
    "without values": lambda tensor: tensor.to("meta"),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.float()),
    "with a gradient": lambda tensor: tensor.float().clone().requires_grad_(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "random bytes": lambda tensor: torch.randint(0, 256, tensor.shape, dtype=torch.uint8).to(tensor.dtype),
}


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to all that `value` holds; of long lists the first and the last."""
    keys: list = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list | tuple):
        keys = list(range(len(value))) if len(value) < 8 else [0, len(value) - 1]
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple, change: Callable[[Any], Any]) -> Any:
    """`value` with what lies at `path` changed; tuples are made anew."""
    if not path:
        return change(value)
    if isinstance(value, tuple):
        return tuple(changed(item, path[1:], change) if i == path[0] else item for i, item in enumerate(value))
    value[path[0]] = changed(value[path[0]], path[1:], change)
    return value


def forged(value: Any, chance: random.Random, odd: tuple) -> tuple[Any, str]:
    """`value` with one place changed, and which."""
    path = chance.choice(sorted(places(value), key=str))
    *outer, key = path
    ways = ["replaced", "removed", "added"]

    def change(old: Any) -> Any:
        if way == "replaced" and isinstance(old, torch.Tensor) and chance.random() < 0.7:
            name = chance.choice(list(TENSORS))
            ways.append(name)
            return TENSORS[name](old)
        return copy.deepcopy(chance.choice(odd))

    def of_container(old: Any) -> Any:
        if isinstance(old, dict):
            kept = {name: item for name, item in old.items() if way != "removed" or name != key}
            return kept if way == "removed" else kept | {chance.choice(("extra", "step", 99)): change(None)}
        items = [item for i, item in enumerate(old) if way != "removed" or i != key]
        return type(old)(items if way == "removed" else [*items, change(None)])

    way = chance.choice(ways)
    value = changed(value, path, change) if way == "replaced" else changed(value, tuple(outer), of_container)
    return value, f"{way} {'.'.join(map(str, path))} {' '.join(ways[3:])}".strip()


def deep_pickle(content: bytes, chance: random.Random) -> bytes:
    """A state whose pickle nests lists: in a key of its own, or in place of the whole."""
    deep = b"]" * DEEP + b"a" * (DEEP - 1)
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/data.pkl"):
                start = data.index(b"(") + 1
                key = chance.choice((b"random", b"deep", b"optimizer"))
                inside = data[:start] + b"X" + len(key).to_bytes(4, "little") + key + deep + data[start:]
                data = chance.choice((inside, b"\x80\x02" + deep + b"."))
            new.writestr(name, data)
    return target.getvalue()


def deep_text(content: bytes, chance: random.Random) -> bytes:
    """A description that nests: as deep as Python reads, or far deeper."""
    depth = chance.choice((20, 300, 900, DEEP))
    before, inside, after = chance.choice(((b"[", b"", b"]"), (b'{"a": ', b"1", b"}")))
    place = chance.choice((b'"step"', b'"num_layers"', b'"commit"'))
    return content.replace(place, b'"deep": ' + before * depth + inside + after * depth + b", " + place, 1)


def forge(source: Path, target: Path, chance: random.Random) -> str:
    """Write a forgery of the checkpoint `source` to `target`, with a manifest that fits; what was changed."""
    shutil.copytree(source, target)
    file = chance.choice((META, META, STATE, STATE, STATE, WEIGHTS))
    path = target / file
    if file == WEIGHTS:
        value, what = forged(load_file(path), chance, OF_STATE[3:])
        save_file({str(k): v.contiguous() for k, v in value.items() if v.dtype != torch.qint8 and not v.is_sparse
                   and not v.is_meta}, path)  # fmt: skip
    elif chance.random() < 0.06:
        content = path.read_bytes()
        path.write_bytes(deep_text(content, chance) if file == META else deep_pickle(content, chance))
        what = "deep"
    elif file == META:
        value, what = forged(json.loads(path.read_text()), chance, VALUES + CONTAINERS)
        path.write_text(json.dumps(value, skipkeys=True))
    else:
        value, what = forged(torch.load(path, weights_only=True), chance, VALUES + CONTAINERS + OF_STATE)
        torch.save(value, path)
    manifest = {name: checkpoints.fingerprint(target / name) for name in checkpoints.FILES}
    (target / MANIFEST).write_text(json.dumps(manifest))
    return f"{file}: {what}"


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    """A run's folder and its corpus."""
    folder = tmp_path_factory.mktemp("honest")
    train(small_run(folder, *SETTINGS, "train.steps=2"), folder / "run")
    return folder


def outcome(settings: Settings, run_dir: Path) -> str:
    """What becomes of a run: 'went on', 'refused', or what is wrong."""
    try:
        train(settings, run_dir)
    except ValueError as error:
        if len(str(error).splitlines()) > 1 and "does not fit" not in str(error):
            return f"several lines: {error}"
        return f"wrote: {error}" if run_dir.exists() else "refused"
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(("count", "seed"), [(40, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_a_forgery_is_refused_in_one_line_or_used(honest, tmp_path, count, seed):
    chance, found, wrong = random.Random(seed), {"refused": 0, "went on": 0}, []
    base = small_run(honest, *SETTINGS, "resume=x", "train.log_every=1", "train.eval_every=0")
    torch.manual_seed(seed)
    for number in range(count):
        forgery = tmp_path / f"step_{number:06d}"
        what = forge(checkpoints.open_checkpoint(honest / "run").path, forgery, chance)
        base.resume = str(forgery)
        end = outcome(base, tmp_path / f"run_{number}")
        if end in found:
            found[end] += 1
        else:
            wrong.append(f"{number} {what}: {end[:300]}")
        shutil.rmtree(forgery)
    print(found)
    assert not wrong, "\n".join(wrong)
    assert found["refused"] > count / 3
    assert found["went on"] > 0  # or nothing would say that the honest one is taken
