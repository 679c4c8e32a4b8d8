"""`python -m scripts.replay`: a step that went wrong, run again with each attention."""

import copy
import itertools
import json
import math
import subprocess
import warnings

import pytest
import torch
from safetensors.torch import load_file

from kernels import flash_attention, naive_attention
from model import ATTENTION
from model.attention import naive
from scripts import replay as replaying
from scripts.parity_verdict import ROOM
from scripts.replay import ReplaySettings, Rerun, first_parting, main, open_dump
from scripts.variants import MUTANTS
from tests.runs import digest, replaced, small_run
from tests.test_bad_input import told
from tests.test_bad_steps import BAD, STORY, Faulty
from train import train
from training import optimizer as optimizers
from training import stepper
from training.checkpoint import open_checkpoint, write_step
from training.hardware import HardwareConfig
from training.random_states import random_states

TINY = ("data.seq_len=16", "train.batch_tokens=64", "train.micro_batch=2")  # flash is in Triton's interpreter
PLACES = [("a", "x"), ("b", "x"), ("c", "x")]
PLACE = {"module": "blocks.1.attention", "tensor": "o", "micro_batch": 1}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """(folder of the dump, the attention that failed there)."""
    folder = tmp_path_factory.mktemp("bad")
    attention = Faulty()
    with replaced("sdpa", attention):
        train(small_run(folder, *STORY, "model.attention=sdpa", "train.steps=6", *TINY), folder / "run")
    return folder / "run" / "bad_steps" / f"step_{BAD:06d}", attention


def replayed(capsys, dump, attention=tuple(ATTENTION), device="cpu"):
    """The rows, by (attention, dtype)."""
    capsys.readouterr()
    main.__wrapped__(ReplaySettings(str(dump), list(attention), HardwareConfig(device=device)), dump)
    lines = capsys.readouterr().out.splitlines()
    return {(row["attention"], row["dtype"]): row for row in json.loads(lines[-1])["runs"]}, "\n".join(lines[:-1])


def test_the_attention_that_failed_is_told_from_those_that_did_not(kept, capsys):
    path, attention = kept
    hits = attention.hits
    with replaced("sdpa", attention):
        rows, said = replayed(capsys, path, ["naive", "tiled", "sdpa"])
    assert attention.hits == hits + 1  # the same bits: the same weights, batch and dropout masks
    for name in ("naive", "tiled"):
        assert rows[name, "float32"]["first_bad"] is None
        assert rows[name, "float32"]["parts"] is None
    found = rows["sdpa", "float32"]
    assert {key: found["first_bad"][key] for key in PLACE} == PLACE
    assert (found["parts"]["module"], found["parts"]["tensor"]) == ("blocks.1.attention", "o")
    assert (
        f"step {BAD} of a run with attention=sdpa in float32 on cpu: its loss was not finite; first in blocks.1" in said
    )
    assert "blocks.1.attention: o, by inf" in said


def what_it_was_given(patch, module, call):
    """The bits of all that decides what the `call`-th step of `module` computes; filled in when it comes."""
    real, calls, given = module.training_step, itertools.count(1), {}

    def step(forward, optimizer, batch, micro_batch, hardware, **options):
        if next(calls) == call:
            given["weights"] = digest([weight.detach() for weight in optimizer.parameters])
            given["moments"] = digest([part["state"] for part in optimizer.state_dict()["optimizer"]])
            given["scale"] = digest(optimizer.state_dict()["loss_scale"])
            given.update(batch=digest(batch), micro_batch=micro_batch)
            given["random"] = digest(random_states())
            if module is stepper:  # what makes it a bad one
                nan = lambda *a, **o: forward(*a, **o) * math.nan  # noqa: E731
                return real(nan, optimizer, batch, micro_batch, hardware, **options)
        return real(forward, optimizer, batch, micro_batch, hardware, **options)

    patch.setattr(module, "training_step", step)
    return given


@pytest.mark.parametrize(("optim", "dtype", "call"), [("muon", "float32", 3), ("adamw", "float16", 5)])
def test_the_step_is_the_runs(tmp_path, monkeypatch, capsys, optim, dtype, call):
    """Weights, moments, float16's scale (not the one that runs begin with), batch, documents and random streams.

    call: which of the replay's runs has this attention in this dtype; a reference and a yardstick come before it.
    """
    story = (*STORY, *TINY, f"optim={optim}", f"hardware.dtype={dtype}", "data.document_mask=true")
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "FIRST_SCALE", 2.0**28)
        run = what_it_was_given(patch, stepper, BAD)
        train(small_run(tmp_path, *story), tmp_path / "run")
    again = what_it_was_given(monkeypatch, replaying, call)
    rows, _ = replayed(capsys, tmp_path / "run" / "bad_steps" / f"step_{BAD:06d}", ["naive"])
    assert ("naive", dtype) in rows
    assert again == run


def test_parting_is_further_than_the_largest_noise_so_far():
    def ran(*errors, values=()):
        return Rerun(torch.float32, errors=dict(zip(PLACES, errors, strict=False)), values=values)

    reference = ran(values={place: torch.ones(1) for place in PLACES})

    def parting(errors, noise):
        found = first_parting(ran(*errors), ran(*noise), reference)
        return found and (found["module"], found["noise"])

    near, far = 0.9e-3 * ROOM, 1.1e-3 * ROOM
    assert parting((near, near, near), (1e-3, 1e-6, 0.0)) is None
    assert parting((near, far, far), (1e-3, 1e-6, 0.0)) == ("b", 1e-3)
    assert parting((0.0, near, near), (1e-6, 1e-4, 1e-3)) == ("b", 1e-4)
    assert parting((0.0, near), (1e-3, 1e-3)) == ("c", 1e-3)  # a tensor that never came
    assert parting((0.0, 0.0, 1e-3), (math.inf, 0.0, 0.0)) == ("c", torch.finfo(torch.float32).eps)
    reference.values["b", "x"] = torch.tensor([math.nan])
    assert parting((0.0, 0.0, far), (1e-3, 1e-3, 1e-3)) is None  # from there on there is nothing to compare with


@pytest.mark.gpu
def test_on_the_gpu_every_attention_in_both_formats(tmp_path, capsys):
    """A bf16 run with flash that failed once: told from the others, and from flash in float32, by the bits of q."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    attention = Faulty(function=flash_attention)
    # Faulty reads q on the host, which a captured graph may not
    story = (*STORY, "hardware.device=auto", "hardware.compile=false", "hardware.cuda_graphs=false")
    story += ("model.attention=flash", "train.steps=6")
    with replaced("flash", attention):
        train(small_run(tmp_path, *story), tmp_path / "run")
        hits = attention.hits
        rows, said = replayed(capsys, tmp_path / "run" / "bad_steps" / f"step_{BAD:06d}", device="cuda")
    assert attention.hits == hits + 1
    assert set(rows) == {(name, dtype) for name in ATTENTION for dtype in ("float32", "bfloat16")}
    failed = rows.pop(("flash", "bfloat16"))
    assert {key: failed["first_bad"][key] for key in PLACE} == PLACE
    assert (failed["parts"]["module"], failed["parts"]["tensor"]) == ("blocks.1.attention", "o")
    for key, row in rows.items():
        assert (row["first_bad"], row["parts"]) == (None, None), key
    assert "attention=flash in bfloat16 on cuda" in said


def test_every_attention_as_it_is_agrees(kept, capsys):
    """Flash in Triton's interpreter too."""
    rows, _ = replayed(capsys, kept[0])
    assert {name for name, _ in rows} == {"naive", "tiled", "sdpa", "flash"}
    for name, row in rows.items():
        assert row["parts"] is None, name
        assert row["first_bad"] is None
        assert float(row["loss"]) == pytest.approx(float(rows["naive", "float32"]["loss"]), rel=1e-5)


def test_numbers_that_are_not_finite_are_told_once_and_by_the_replay(kept, tmp_path, capsys):
    """NumPy, in which Triton's interpreter computes, warned of them in the middle of what is printed."""
    dump = open_checkpoint(kept[0])
    weights = load_file(dump.path / "model.safetensors")
    weights["blocks.0.attention.qkv.weight"].mul_(1e30)
    path = write_step(tmp_path, weights, dump.load_state(), dump.meta)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        rows, _ = replayed(capsys, path, ["flash"])
    assert rows["flash", "float32"]["first_bad"]["module"] == "blocks.0.attention"


def test_masks_of_processes_that_shared_rows_are_others(kept, capsys):
    dump = open_checkpoint(kept[0])
    dump.meta["settings"]["parallel"]["context"] = 2
    dump.meta["settings"]["model"]["dropout"] = 0.1
    replaying.show(dump, [], "cpu")
    assert "dropout's masks are not the run's: each process drew those of its part" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mutant", "place"),
    [
        ("mask off by one", ("blocks.0.attention", "o")),  # the first layer, forward
        ("scale x 1.01", ("blocks.0.attention", "o")),
        ("dK without one block", ("blocks.1.attention", "dk")),  # the last layer, which is the first backward
    ],
)
def test_a_wrong_attention_parts_where_it_is_wrong(kept, capsys, mutant, place):
    with replaced("tiled", MUTANTS[mutant][0]):
        rows, _ = replayed(capsys, kept[0], ["tiled"])
    parts = rows["tiled", "float32"]["parts"]
    assert (parts["module"], parts["tensor"]) == place


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_beside_float32(tmp_path, capsys, dtype):
    """The run's dtype and float32; where only 16 bits overflow, they part, and every attention alike."""

    def huge(q, k, v, *, documents=None, **options):  # finite in float32 and bfloat16, beyond float16's 65,504
        return naive_attention(q, k, v, **options) * 1e9

    with replaced("naive", huge), replaced("tiled", huge):
        train(small_run(tmp_path, *STORY, f"hardware.dtype={dtype}", "train.on_nonfinite=skip"), tmp_path / "run")
        dumps = list((tmp_path / "run").glob("bad_steps/*"))
        if dtype == "bfloat16":
            assert dumps == []
            return
        rows, said = replayed(capsys, min(dumps), ["naive", "tiled"])
    for name in ("naive", "tiled"):
        assert rows[name, "float32"]["first_bad"] is None
        found = rows[name, "float16"]
        assert (found["first_bad"]["module"], found["first_bad"]["tensor"]) == ("blocks.0.attention", "o")
        assert (found["parts"]["module"], found["parts"]["tensor"]) == ("blocks.0.attention", "o")
    assert "in float16 on cpu" in said


def test_documents_and_what_cannot_run(tmp_path, capsys):
    story = [*STORY, "data.document_mask=true", "model.activation_checkpointing=full"]
    attention = Faulty()

    def faulty(*arguments, documents, **options):
        o = naive(*arguments, documents=documents, **options)
        attention.calls += 1
        return o * float("nan") if attention.calls == 18 else o

    with replaced("tiled", faulty):
        train(small_run(tmp_path, *story, "model.attention=tiled", "train.on_nonfinite=skip"), tmp_path / "run")
    rows, _ = replayed(capsys, *(tmp_path / "run").glob("bad_steps/*"), ["naive", "tiled", "sdpa"])
    assert "varlen" in rows["sdpa", "float32"]["refused"]
    assert rows["tiled", "float32"]["parts"] is None


def test_the_command_line(kept, tmp_path, quick_python):
    def run(*arguments):
        command = [quick_python, "-m", "scripts.replay", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    done = run(f"dump={kept[0]}", "attention=[sdpa]", "hardware.device=cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["step"], [row["parts"] for row in result["runs"]]) == (BAD, [None])
    assert list(tmp_path.iterdir()) == []  # nothing is written


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "dump= is not given; give a folder such as runs/"),
        (["dump=nowhere"], "checkpoint nowhere does not exist; give a folder such as"),
        (["dump=HERE"], "checkpoint HERE has no checkpoint.json; give a folder"),
        (["dump=LAST"], "checkpoint LAST is no bad step's; give a folder such as runs/.../bad_steps/step_000123"),
        (["attention=[]"], "attention=[] runs nothing; name one, as attention=[flash]"),
        (["attention=[fast]"], "attention=fast is not one of flash, naive, tiled, sdpa"),
        (["hardware.dtype=float16"], "hardware.dtype=float16: a step is run again in float32 and in its own dtype"),
        (["attention=[naive,naive]"], "attention has naive twice; name each once"),
        (["hardware.compile=true"], "hardware.compile=true: a step is run again in float32 and in its own dtype, not"),
    ],
)
def test_a_mistake_is_one_line(kept, tmp_path, monkeypatch, capsys, arguments, error):
    places = {"HERE": str(tmp_path), "LAST": str(kept[0].parent.parent / "checkpoints" / "last")}
    for name, place in places.items():
        arguments, error = [a.replace(name, place) for a in arguments], error.replace(name, place)
    outcome = told("scripts.replay", arguments, monkeypatch, capsys)
    assert outcome.code == 2
    assert outcome.error.startswith(f"error: {error}")
    assert len(outcome.error.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s["model"].update(shape=3), "has model.shape, which this version does not know; use the commit"),
        (lambda s: s["optim"].update(pace=1), "has optim.pace, which this version does not know; use the commit"),
        (lambda s: s["model"].update(n_embd="32"), "has a str as its settings.model.n_embd; use another"),
        (lambda s: s["data"].pop("document_mask"), "has no settings.data.document_mask; use another"),
        (lambda s: s["model"].update(name="gpt2"), "is of gpt2, a model of transformers, in which no attention can be"),
    ],
)
def test_a_step_of_another_version_or_model_is_refused(kept, tmp_path, change, error):
    dump = open_checkpoint(kept[0])
    settings = copy.deepcopy(dump.meta["settings"])
    change(settings)
    meta = {**dump.meta, "settings": settings}
    path = write_step(tmp_path, load_file(dump.path / "model.safetensors"), dump.load_state(), meta)
    with pytest.raises(ValueError, match=error):
        open_dump(str(path))
