"""The programs that measure generation, on a CPU: figures mean nothing here, but rows, files and refusals do."""

import json
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from scripts.bench import cache_bits, generation
from scripts.bench.generation import BenchConfig
from tests.runs import CORPUS, SMALL, settings_of

pytestmark = pytest.mark.usefixtures("smoke_test")
CPU = torch.device("cpu")
TINY = ("model.num_layers=1", "data.seq_len=16", "train.batch_tokens=32", "train.eval_windows=2")


# --- caches in 8 bits


@pytest.fixture
def by_the_definition(monkeypatch):
    """What a CPU runs; the kernel in Triton's interpreter, which is slow, has tests of its own."""
    monkeypatch.setattr("kernels.decode.interpreting", lambda: False)


@pytest.mark.usefixtures("by_the_definition")
def test_each_dtype_of_a_cache_has_its_memory_latency_error_and_loss(tmp_path, capsys, monkeypatch):
    times, real = [], cache_bits.latency
    monkeypatch.setattr(cache_bits, "latency", lambda *call: times.append(real(*call)) or times[-1])
    (tmp_path / "corpus.txt").write_text(CORPUS)
    settings = settings_of(
        cache_bits.main, *SMALL, *TINY, "data=text", f"data.files={tmp_path / 'corpus.txt'}", "train.steps=2",
        f"data.cache_dir={tmp_path / 'cache'}", "bench.batch=2", "bench.context=20", "bench.num_heads=2",
        "bench.num_kv_heads=1", "bench.head_dim=16", "bench.page=16", "resume=auto",
    )  # fmt: skip
    cache_bits.main.__wrapped__(settings, tmp_path / "run")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["cache"]: row for row in found["rows"]}
    assert list(rows) == ["float32", "int8", "e4m3"]
    assert rows["float32"]["mib"] / 4 < rows["int8"]["mib"] == rows["e4m3"]["mib"] < rows["float32"]["mib"] / 2
    errors = [row["relative_error"] for row in rows.values()]
    assert errors[0] < 1e-5 < errors[1] < errors[2] < 0.1
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows.values())
    assert [row["p50_us"] for row in rows.values()] == [1e3 * time.p50 for time in times]
    assert all(row["more_loss"] == row["val_loss"] - found["loss_without_cache"] for row in rows.values())
    assert abs(rows["float32"]["more_loss"]) < 1e-5 < max(abs(rows[name]["more_loss"]) for name in ("int8", "e4m3"))
    assert rows["int8"]["val_loss"] == pytest.approx(found["loss_without_cache"], abs=0.01)
    assert (tmp_path / "run" / "cache_bits.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 1}, "bench.context=1 must be at least 2"),
        ({"num_heads": 3}, "bench.num_heads=3 is no multiple of bench.num_kv_heads=8; use one"),
        ({"head_dim": 17}, "bench.head_dim=17 must be even, from 16 to 256"),
        ({"head_dim": 8}, "bench.head_dim=8 must be even, from 16 to 256"),
        ({"page": 48}, "bench.page=48 must be a power of two from 16 on"),
        ({"page": 8}, "bench.page=8 must be a power of two from 16 on"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_a_model_is_trained(wrong, message):
    with pytest.raises(ValueError, match=message):
        cache_bits.BenchConfig(**wrong)


# --- generate()


def test_calls_take_turns_and_their_steps_are_told_apart():
    turns = []

    def ours(prompts, new_tokens):
        turns.append("ours")
        return [0.0, 0.5, *(0.5 + 0.1 * step for step in range(1, new_tokens))]

    def theirs(prompts, new_tokens):
        turns.append("theirs")
        return [0.0, 1.0 + 0.2 * (new_tokens - 1)]  # it says nothing between steps

    rows = generation.rounds({"ours": ours, "theirs": theirs}, [[1, 2]] * 3, 11, 2, CPU)
    assert turns[2:] == ["ours", "theirs"] * 2
    assert rows["ours"]["tokens_per_second"] == pytest.approx(33 / 1.5)
    assert rows["theirs"]["tokens_per_second"] == pytest.approx(33 / 3.0)
    for name, step in (("ours", 100), ("theirs", 3000 / 11)):
        assert rows[name]["step_ms"] == pytest.approx(step)
    assert rows["ours"]["first_ms"] == pytest.approx(500)
    assert rows["ours"]["tokens_per_second_after"] == pytest.approx(3 / 0.1)
    assert "first_ms" not in rows["theirs"]
    assert rows["ours"]["step_p99_ms"] == pytest.approx(100)
    assert "step_p99_ms" not in rows["theirs"]


def test_copies_and_waits_are_counted_by_the_step(monkeypatch):
    names = ["Memcpy DtoH (Device -> Pageable)"] * 16 + ["Memcpy HtoD"] * 9 + ["cudaEventSynchronize"] * 8

    class Watched:
        def __init__(self, **_): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def events(self):
            return [SimpleNamespace(name=name) for name in names]

    monkeypatch.setattr(generation, "profile", Watched)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    drawn = Counter()

    def steps(number):
        for _ in range(number):
            drawn[number] += 1
            yield []

    assert generation.counted(lambda: steps(100)) == {"copies_per_step": 1.0, "waits_per_step": 0.5}
    assert drawn[100] == 24
    assert generation.counted(lambda: steps(20)) == {}


@pytest.mark.gpu
def test_a_step_copies_nothing_to_the_host_but_its_tokens():
    model = small_gpt(attention="flash", n_embd=64).cuda().for_inference(torch.bfloat16)
    begin = partial(generation.steps_of, model, {"temperature": 0.8, "top_k": 5}, [[1, 2, 3], [4, 5]], 40)
    assert generation.counted(begin)["copies_per_step"] == 1.0


def small_gpt(**changed):
    config = GPTConfig(**{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "n_embd": 32, "attention": "sdpa",
                          "loss": "plain"} | changed)  # fmt: skip
    return GPT(config, 100, 48, generator=torch.Generator().manual_seed(0)).eval()


def test_the_plain_forward_is_the_model():
    model, prompts = small_gpt(), [[1, 2, 3, 4], [5, 6, 7, 8]]
    with torch.no_grad():
        logits = generation.last_logits(model, torch.tensor(prompts))
        torch.testing.assert_close(logits, model(torch.tensor(prompts))[:, -1])


def test_a_model_that_transformers_has_not_is_refused(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    with pytest.raises(ValueError, match=r"ArceeForCausalLM has no model.mlp=swiglu, .*use gelu or relu2"):
        generation.load_peer(small_gpt(mlp="swiglu"))


@pytest.mark.parametrize("changed", [{}, {"mlp": "relu2", "tie_embeddings": False}, {"num_kv_heads": 4}])
def test_the_peer_is_the_same_model(changed):
    pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    model = small_gpt(**changed)
    peer = generation.load_peer(model)
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(peer(tokens).logits, model(tokens), atol=1e-5, rtol=1e-4)


def test_another_model_is_no_peer(monkeypatch):
    model, prompts, far = small_gpt(), [[1, 2, 3, 4], [5, 6, 7, 8]], torch.zeros(2, 4, 100)
    right = [[token for step in generation.steps_of(model, {"temperature": 0.0}, [p], 4) for _, token in step]
             for p in prompts]  # fmt: skip
    monkeypatch.setattr(generation, "version", lambda _: "0")
    monkeypatch.setattr(generation, "continued_by", lambda *_: [right[0], [right[1][0], -1, *right[1][2:]]])
    with torch.no_grad():
        largest = model(torch.tensor(prompts)).abs().max()
        far[0, 0, 0], far[0, 0, 1] = 0.04 * largest, -0.04 * largest  # a mean would not see it
        found = generation.same_model(model, lambda x: SimpleNamespace(logits=model(x) + far), prompts)
        assert found["logits_apart"] == pytest.approx(0.04, rel=1e-3)
        assert (found["tokens"], found["equal_tokens"]) == (8, 7 / 8)
        far *= 2
        with pytest.raises(RuntimeError, match=r"logits are 0.08 of the largest apart: it is another model"):
            generation.same_model(model, lambda x: SimpleNamespace(logits=model(x) + far), prompts)
    assert generation.PEERS["transformers_static"] == {"cache_implementation": "static"}


def test_without_transformers_ours_are_timed_alone(tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        settings = settings_of(
            generation.main, "bench.batch=[2]", "bench.prompt_tokens=6", "bench.new_tokens=5", "bench.rounds=2",
            "bench.prefill_batch=2", "bench.prefill_tokens=9", "bench.vocab_size=70", "hardware.device=cpu",
            "model.num_layers=1", "model.num_heads=2", "model.n_embd=32", "model.attention=sdpa",
        )  # fmt: skip
        generation.main.__wrapped__(settings, tmp_path)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("transformers cannot be imported")
    rows = json.loads(said[-1])["rows"]
    of = [(row["model"], row["choice"][:6], row["new_tokens"]) for row in rows]
    assert of == [("gpt", "greedy", 5), ("gpt", "top_k ", 5), ("gpt", "readin", 1), ("forward", "readin", 1)]
    assert all(row["step_p99_ms"] >= row["step_ms"] > 0 for row in rows[:2])
    assert rows[2]["of_forward"] == rows[2]["first_ms"] / rows[3]["first_ms"]
    assert rows[3]["of_forward"] == 1.0
    assert "Ours alone." in (tmp_path / "bench_generation.md").read_text()


def test_impossible_benchmarks_are_refused():
    with pytest.raises(ValueError, match=r"bench.which=vllm is not one of gpt, transf"):
        BenchConfig(which=["vllm"])
    with pytest.raises(ValueError, match=r"bench.batch=\[1, 0\] must be at least 1"):
        BenchConfig(batch=[1, 0])
