"""Several processes, one run: the same bits as one, and an end for all when one of them ends.

tests/processes.py starts them; see there what each case does.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from model import GPTConfig
from scripts.cluster import network
from tests.runs import settings, small_run
from train import train
from training import parallel
from training.context import context_parallel
from training.gradient_sum import GradientSum
from training.hardware import Hardware
from training.memory import Plan
from training.optimizer import OptimConfig
from training.ordered_sum import ALIGNED, PIECE, cut, padded, tree_sum
from training.owners import Owners, dealt_by_cost
from training.parallel import ALONE, ParallelConfig, World
from training.rendezvous import meet, ranks
from training.run import Run, resolve
from training.step_messages import NUM_VOTES, SLOW_STEPS, StepClock
from training.watchdog import LIMITS, Failure, Watchdog

ROOT = Path(__file__).resolve().parent.parent


def cases_of(python: str, folder: Path, *only: str) -> dict:
    done = subprocess.run(
        [python, "-m", "tests.processes", str(folder), *only],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # to look for GPUs must not keep it from forking
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory, quick_python) -> dict:
    return cases_of(quick_python, tmp_path_factory.mktemp("processes"))


@pytest.mark.gpu
def test_two_gpus_have_one_ones_bits_and_end_together(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    found = cases_of(sys.executable, tmp_path, "gpus")
    one, two = found["nccl_1"], found["nccl_2"]
    assert two["codes"] == [0, 0], two["err"]
    assert (one["contents"], one["metrics"]) == (two["contents"], two["metrics"])
    for case in ("killed", "stopped"):
        assert found[case]["codes"] == [69, -9], found[case]["err"]
        assert "error: rank 1 of 2 on " in found[case]["err"][0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_1_2_and_4_processes_end_with_the_same_bits(found, optimizer):
    """Weights, moments, random streams, losses, norms, evaluations of 10 steps, with dropout and accumulation."""
    runs = [found[f"{optimizer}_{size}"] for size in (1, 2, 4)]
    for size, run in zip((1, 2, 4), runs, strict=True):
        assert run["codes"] == [0] * size, run["err"]
        assert run["step"] == 10
    assert len({run["contents"] for run in runs}) == 1
    assert runs[0]["metrics"] == runs[1]["metrics"] == runs[2]["metrics"]
    assert len(runs[0]["metrics"]) == 10


def test_a_run_goes_on_with_other_processes_and_the_same_bits(found):
    first, second, last = (found[f"resumed_{life}"] for life in range(3))
    assert (first["codes"], first["step"]) == ([143], 3)
    # rank 1 alone was told, in step 7: its vote is in that step's sum
    assert (second["codes"], second["step"]) == ([138, 138], 8)
    assert last["codes"] == [0]
    whole = found["muon_1"]
    assert (last["contents"], last["metrics"]) == (whole["contents"], whole["metrics"])


def test_processes_that_share_weights_end_with_the_bits_of_one(found):
    """With a micro-batch each, Muon and AdamW, rows that 4 do not divide, dropout, and recomputed activations."""
    alone, shared = found["shard_1"], found["shard_4"]
    assert shared["codes"] == [0] * 4, shared["err"]
    assert shared["contents"] == alone["contents"]
    for one, other in zip(alone["metrics"], shared["metrics"], strict=True):
        assert other.pop("grad_norm", 0.0) == pytest.approx(one.pop("grad_norm", 0.0)), "its squares are added by rows"
        assert one == other
    line = "shard      4 processes hold 1 / 4 each of weights, gradients and moments"
    assert line in shared["out"][0]
    assert line not in alone["out"][0]
    assert all("sharded Block Block GPT\n" in out for out in shared["out"]), "a block is gathered by itself"
    samples = [run["out"][0].partition("--- a sample")[2].partition("---")[0] for run in (alone, shared)]
    assert samples[0] == samples[1] != ""


def test_a_run_goes_on_with_shared_weights_and_with_whole_ones(found):
    """1 -> 4 with shard -> 2 with replicate, and the bits of one process that was never asked to stop."""
    assert [found[f"moved_{size}"]["codes"] for size in (1, 4, 2)] == [[138], [138] * 4, [0, 0]]
    assert found["moved_1"]["step"] < found["moved_4"]["step"] < found["moved_2"]["step"]
    assert found["moved_2"]["contents"] == found["shard_1"]["contents"]


def test_shared_weights_give_the_same_bits_at_the_same_number_of_processes(found):
    """Stopped and resumed, with accumulation and gradients that are clipped."""
    assert found["stopped_0"]["codes"] == [138, 138]
    assert found["stopped_1"]["contents"] == found["clipped"]["contents"]
    assert found["stopped_1"]["metrics"] == found["clipped"]["metrics"]
    norms = [line["grad_norm"] for line in found["clipped"]["metrics"] if "grad_norm" in line]
    assert min(norms) > 0.5, "or nothing was clipped"


def test_processes_share_weights_and_rows(found):
    assert found["rows_shard"]["codes"] == [0, 0], found["rows_shard"]["err"]
    assert found["rows_shard"]["contents"] == found["rows"]["contents"]


def test_a_bad_step_of_shared_weights_and_rows_is_named_kept_whole_and_gone_back_from(found):
    bad = found["bad_shard"]
    assert bad["codes"] == [0, 0], bad["err"]
    assert "its loss is not finite; first in blocks." in bad["out"][0]
    assert "back to the weights of" in bad["out"][0]
    # of the second one the first process finds nothing
    assert "finite when run again (run again by one process, with other roundings and dropout masks)" in bad["out"][0]
    assert bad["shapes"][0] == bad["shapes"][1]
    assert [320, 16] in bad["shapes"][0]


def test_blocks_of_shared_weights_are_compiled_once(found):
    """Two of them: a graph to train and one to evaluate."""
    compiled = found["compiled"]
    assert compiled["codes"] == [0, 0], compiled["err"]
    assert compiled["out"][0].endswith("graphs 2\n")
    losses = [[line["loss"] for line in found[name]["metrics"] if "loss" in line] for name in ("compiled", "clipped")]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.02)


def test_a_bad_step_is_skipped_by_all(found):
    alone, shared = found["nan_1"], found["nan_2"]
    assert alone["summary"]["bad_steps"] == shared["summary"]["bad_steps"] > 0
    assert (alone["contents"], alone["metrics"]) == (shared["contents"], shared["metrics"])
    assert shared["codes"] == [0, 0], shared["err"]


def test_only_the_first_prints_and_writes(found):
    told = found["told"]
    assert told["codes"] == [0, 0], told["err"]
    assert len({name.partition("/")[0] for name in told["runs"]}) == 1, "one folder"
    assert "2 processes" in told["out"][0]
    assert "validation loss" in told["out"][0]
    assert told["out"][1] == ""


def test_a_mistake_is_one_line(found):
    refused, failed = found["refused"], found["failed"]
    assert refused["codes"] == failed["codes"] == [2, 2]
    assert refused["err"][0].startswith("error: train.micro_batch=3 does not divide the 16 sequences")
    assert refused["err"][0].count("\n") == 1
    assert "error: " not in refused["err"][1], "the first process has said it"
    assert refused["runs"] == []
    for name, words in {"mistyped": "train.lrr is not a known key", "flag": "unrecognized arguments: --lr"}.items():
        assert found[name]["codes"] == [2, 2]
        assert found[name]["err"][0].startswith(f"error: {words}")
        assert (found[name]["err"][0].count("\n"), found[name]["err"][1]) == (1, ""), "the same for all"
    (line,) = failed["err"][0].splitlines()
    assert line.startswith("error: rank 1 of 2 on ")
    assert "the moon is full; wait a week" in line
    (log,) = (name for name in failed["runs"] if name.endswith("rank_1.log"))
    assert log in line


def test_a_mistake_that_all_find_leaves_nothing(found):
    """The other's traceback is not what a run has written that begins."""
    run = found["none_begins"]
    assert run["codes"] == [2, 2], run["err"]
    assert (run["err"][0], run["runs"]) == ("error: the moon is full; wait a week\n", [])


def test_a_full_or_bad_disk_costs_checkpoints_and_no_step(found):
    """While it was so; another rank's disk is not asked. All say "not saved", who writes with the reason."""
    run, whole = found["disk"], found["muon_1"]
    assert run["codes"] == [0, 0], run["err"]
    said = [line for line in run["out"][0].splitlines() if line.startswith("not saved: step")]
    assert [line.split()[3] for line in said] == ["4", "5", "6", "7"]
    assert ["No space left on device" in line for line in said] == [True, True, False, False]
    assert ["Input/output error" in line for line in said] == [False, False, True, True]
    heard = run["err"][1].splitlines()  # on its own stderr; of two that were lost between two steps the later
    assert [line.partition(" of 2 on ")[0] for line in heard][-1] == "not saved: step 7: rank 0"
    assert "rank 1 of 2 on " in heard[-1]
    assert heard[-1].endswith(" goes on")
    assert (run["contents"], run["metrics"]) == (whole["contents"], whole["metrics"])


def test_all_end_where_the_last_checkpoint_is_not_saved(found):
    run = found["full"]
    assert run["codes"] == [2, 2]
    assert run["out"][0].count("not saved: step") == 3
    (line,) = (line for line in run["err"][0].splitlines() if line.startswith("error: "))
    assert "No space left on device" in line


@pytest.mark.parametrize(
    ("case", "left", "says"),
    [
        ("killed", [69, -9, 69, 69], "rank 1 of 4 on HOST, after step"),
        ("first_killed", [-9, 69], "rank 0 of 2 on HOST, after step"),
        ("stopped", [69, -9], "rank 1 of 2 on HOST, after step"),
        ("first_stopped", [-9, 69], "rank 0 of 2 on HOST, after step"),
        ("hung", [69, 69], "rank 1 of 2 on HOST, after step 3: the others have waited"),
        ("killed_shard", [69, -9], "rank 1 of 2 on HOST, after step"),
        ("parted", [1, 1], "rank 1 of 2 on HOST, step 4: its weights are not those of rank 0"),
    ],
)
def test_all_end_with_a_line_that_names_who_is_lost(found, case, left, says):
    run = found[case]
    assert run["codes"] == left, run["err"]
    living = run["err"][left.index(-9) - 1 if -9 in left else 0]
    before, _, after = says.partition("HOST")
    assert before in living
    assert after in living
    assert sum(words.count("error: ") for words in run["err"]) <= 1, "who ends because of it names nobody else"
    if case != "hung":
        assert run["step"] >= 3, "its checkpoints are whole"


# --- without processes


def gradients_of(order: list[torch.Tensor]) -> torch.Tensor:
    """What `GradientSum` makes of these gradients, one a micro-batch."""
    weight, unused = (torch.zeros_like(order[0], requires_grad=True) for _ in range(2))
    total = GradientSum([unused, weight], ALONE, len(order))
    for gradient in order:
        (weight * gradient).sum().backward()
        total.add(gradient.sum())
    assert torch.equal(total.total(), tree_of([gradient.sum() for gradient in order])), "losses are terms as well"
    assert not unused.grad.any()
    return weight.grad


def tree_of(terms: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in the order that is promised."""
    first = (len(terms) + 1) // 2
    return terms[0] if len(terms) == 1 else tree_of(terms[:first]) + tree_of(terms[first:])


@pytest.mark.parametrize("lost", ["init_process_group", "init_device_mesh", "set", "wait", "delete_key"])
def test_a_store_that_is_gone_is_another_s_end(lost, monkeypatch):
    """Who keeps it was killed while this process was meeting the others or told them something."""

    def reset(*args, **options):
        raise dist.DistNetworkError("Connection reset by peer")

    def wait_for_the_end(reason):
        sys.exit(reason)

    class Store(dist.HashStore):
        def wait(self, keys, timeout):
            """The other one is here."""
            self.set(keys[1], "null")

    world = World(size=2)
    world._store, world.watchdog = Store(), SimpleNamespace(wait_for_the_end=wait_for_the_end)
    world.all_gather(1)
    world._group_for = world._group_for if lost == "init_process_group" else lambda device: None
    monkeypatch.setattr(dist if lost.startswith("init_") else Store, lost, reset)
    with pytest.raises(SystemExit, match="Connection reset by peer"):
        world.mesh(torch.device("cpu")) if lost.startswith("init_") else world.all_gather(2)


def test_who_ends_in_the_middle_of_a_step_ends_all(monkeypatch):
    """What fails where rows, weights or Muon's products are shared is the end of another one, too."""

    def reset(*args, **options):
        raise RuntimeError("Connection reset by peer")

    world, owners = several(2), object.__new__(Owners)
    world.watchdog = SimpleNamespace(wait_for_the_end=sys.exit)
    shared = SimpleNamespace(applied_to=lambda model, forward: nullcontext(forward))
    for context in (shared, None):
        world.shards = context is None
        with pytest.raises(SystemExit, match="reset"), context_parallel(context, None, reset, world) as forward:
            forward()
    world.shards = False
    owners._world, owners.owners, owners._group, owners._dtype = world, [1], None, torch.bfloat16
    monkeypatch.setattr(dist, "broadcast", reset)
    with pytest.raises(SystemExit, match="reset"):
        list(owners.computed([torch.ones(1, 2, 2)], torch.neg))


@pytest.mark.parametrize(("rows", "size"), [(18, 4), (5, 4), (2, 4), (16, 4), (1, 2)])
def test_muon_knows_who_has_which_rows(rows, size):
    """Those that FSDP2 gives it, which are none for some."""
    owners = object.__new__(Owners)
    owners._world, owners._shapes = several(size), [torch.Size((3, rows, 7))]
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(size)]
    expected = [*chunks, *[0] * (size - len(chunks))]
    assert [owners._rows_of(rank, 0) for rank in range(size)] == [(3, some, 7) for some in expected]


def test_what_only_the_first_has_is_nothing_in_the_others():
    """But an error inside is heard."""
    assert World(size=2).on_first(print) is print
    nothing = World(rank=1, size=2).on_first(pytest.fail)
    assert not nothing("a line").of.any.kind(1, key=2)
    with pytest.raises(KeyError), nothing("a folder"):
        raise KeyError


def test_who_fails_tells_the_others_and_watches_no_more():
    """Its own watch would say the same line again."""
    world, done = several(2), []
    world.watchdog, world.step = SimpleNamespace(stop=lambda: done.append("stopped"), post=done.append), 4
    world.fail("the moon is full", 2)
    assert done == ["stopped", Failure(0, "host0", 4, "the moon is full", 2)]


def test_all_leave_together_and_the_first_as_the_last():
    """Who went alone would count as lost where another still saves, and the store may be the first one's."""
    for rank, last in ((0, ["left/1", "left/2"]), (1, "left/1")):
        world, done = several(3), []
        world.rank, world.all_gather = rank, done.append
        world.watchdog = SimpleNamespace(stop=lambda done=done: done.append("stopped"))
        world._store = SimpleNamespace(
            wait=lambda keys, timeout, done=done: done.append(keys), set=lambda key, _, done=done: done.append(key)
        )
        world.close()
        assert done == ["end", "stopped", last]


def test_what_was_gathered_stays_no_longer_than_somebody_may_read_it():
    """Each deletes its own once all have read it, which they have when they came to the next."""

    class Store(dist.HashStore):
        def wait(self, keys, timeout):
            """The other one is here."""
            self.set(keys[0], "7")

    world, store = World(rank=1, size=2), Store()
    world._store = store
    for number in range(3):
        assert world.all_gather(number) == [7, number]
        assert world.collectives_entered == number + 1, "or nobody sees who is missing"
        kept = [earlier for earlier in range(3) if store.check([f"all_gather/{earlier}/1"])]
        assert kept == [number]
    assert all(store.check([f"all_gather/{number}/0"]) for number in range(3))
    assert world.broadcast("unheard") == 7


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_micro_batches_are_summed_as_a_binary_tree(count):
    generator = torch.Generator().manual_seed(count)
    terms = list(torch.randn(count, 1000, generator=generator))
    expected = tree_of(terms)
    assert torch.equal(gradients_of(terms), expected)
    if count >= 4:
        assert not torch.equal(gradients_of(terms), sum(terms)), "the order must show, or this has shown nothing"
    if count >= 2:  # as the parts that processes sum are
        tree_sum([x.clone() for x in terms], out=(found := torch.empty(1000)))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_the_sum_lies_where_a_graph_writes_every_gradient(count):
    """So that the optimizer's graph reads it there."""
    generator = torch.Generator().manual_seed(count)
    terms, place = list(torch.randn(count, 100, generator=generator)), torch.empty(100)
    weight = torch.zeros(100, requires_grad=True)
    total = GradientSum([weight], ALONE, count, copied=True)
    for gradient in terms:
        place.copy_(gradient if weight.grad is None else place + gradient)
        weight.grad = place
        total.add(gradient.sum())
    total.total()
    assert weight.grad.data_ptr() == place.data_ptr()
    assert torch.equal(place, gradients_of(terms))


def test_sums_over_processes_lie_where_the_terms_lay(monkeypatch):
    """There a graph reads them."""
    world = several(2)
    monkeypatch.setattr(world, "_group_for", lambda device: None)
    monkeypatch.setattr(parallel, "sum_over_ranks", lambda terms, group: torch._foreach_mul_(terms, 2))
    terms = [torch.ones(3, 5), torch.ones(130), torch.ones(())]
    turned = torch.ones(3, 5).T
    sums, loss = world.sum([*terms, turned], torch.tensor(3.0), [torch.ones(2)])
    assert [x.data_ptr() for x in sums[:3]] == [x.data_ptr() for x in terms]
    assert all((x == 2).all() and x.is_contiguous() for x in sums), "a library sums what is contiguous"
    assert loss == world.messages.tail[0] == 6


def test_what_is_summed_is_cut_into_pieces_of_one_size():
    shapes = ((3, 5), (), (10 * ALIGNED,), (1,), (5, ALIGNED), (0,))
    terms = [torch.randn(shape) for shape in shapes]
    pieces = cut(terms, 4 * ALIGNED)
    assert [sum(map(padded, piece)) for piece in pieces] == [4 * ALIGNED] * (len(pieces) - 1) + [2 * ALIGNED]
    for x in (x for piece in pieces for x in piece):
        x.add_(1)
        assert x.storage_offset() % ALIGNED == 0, "as aligned as its tensor"
    assert torch.equal(
        torch.cat([x for piece in pieces for x in piece]), torch.cat([term.view(-1) for term in terms])
    ), "all of them, in place"


def test_ranks():
    assert ranks({}) == (0, 1, 0)
    assert ranks({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    step = {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    assert ranks(step) == (2, 4, 0)
    assert ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == (0, 1, 0), "a shell of salloc"
    assert ranks(step | {"SLURM_STEP_NUM_TASKS": "1"}) == (0, 1, 0), "alone, whatever the others say"
    with pytest.raises(ValueError, match="RANK is not set beside WORLD_SIZE"):
        ranks({"WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="WORLD_SIZE=abc is no number; start with torchrun or srun"):
        ranks({"RANK": "0", "WORLD_SIZE": "abc", "LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS=abc is no number; start with torchrun or srun"):
        ranks(step | {"SLURM_STEP_NUM_TASKS": "abc"})
    with pytest.raises(ValueError, match="RANK=2 is not 0 to 1, as WORLD_SIZE=2 says; start with torchrun or srun"):
        ranks({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(ValueError, match="RANK=-1 is not 0 to 1, as WORLD_SIZE=2 says; start with torchrun or srun"):
        ranks({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    for size in ("0", "-1"):
        with pytest.raises(ValueError, match=f"RANK=0 is not possible with WORLD_SIZE={size}"):
            ranks({"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0"})


@pytest.mark.parametrize("port", ["abc", "", "0", "65536", "-1"])
def test_where_nobody_can_meet_is_said_at_once(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match=f"MASTER_PORT={port} is no port; use one number from 1 to 65535"):
        meet(1, 2, 1)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"MASTER_PORT={port} is no port"):
        network(Hardware(torch.device("cpu"), torch.float32, False, ""))  # of doctor


def test_who_cannot_meet_is_told_why_in_one_line(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        monkeypatch.setenv("MASTER_PORT", "1234")
        if name == "MASTER_PORT":
            monkeypatch.setenv("MASTER_ADDR", "elsewhere")
            monkeypatch.delenv("MASTER_PORT")
        with pytest.raises(ValueError, match=f"{name} is not set, and 2 processes must meet; torchrun sets it"):
            meet(1, 2, 1)

    def nobody(*args, **options):
        raise dist.DistNetworkError("timed out\nException raised from nowhere")

    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(dist, "rendezvous", nobody)
    expected = r"^rank 1 of 2 cannot meet the others at elsewhere:1234 [(]timed out[)]; start all with that address$"
    with pytest.raises(ValueError, match=expected):
        meet(1, 2, 1)


def test_processes_that_are_started_again_hear_nothing_of_those_before(monkeypatch):
    """torchrun --max-restarts keeps the store, and they ended of the message that had ended the first ones."""
    store, names = dist.HashStore(), []
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(store, 0, 2)]))
    monkeypatch.setattr("training.rendezvous.World", lambda *args: names.append(args[3]) or SimpleNamespace())
    monkeypatch.setattr("training.rendezvous.Watchdog", lambda *args: None)
    for of_host, attempt in (("2", "0"), ("2", "1"), ("1", "1")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", of_host)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        meet(0, 2, 0)
    names[0].set("failed", "rank 1")
    assert [name.check(["failed"]) for name in names] == [True, False, True], "hosts count their own restarts"


def test_muons_exchanges_count_for_who_waits(monkeypatch):
    """A process that hangs in a product of its own has entered fewer."""
    world, x = several(2), torch.ones(1, 2, 2)
    world.flat_mesh = lambda device: SimpleNamespace(get_group=lambda: None)
    monkeypatch.setattr(dist, "broadcast", lambda *args, **options: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: None)
    owners = Owners(world, [x.shape] * 3, [1.0] * 3, torch.float32, torch.device("cpu"))
    list(owners.computed([x] * 3, lambda matrices: matrices))
    assert world.collectives_entered == 3
    owners._exchange([[x], [x]], [[x.shape], [x.shape]])
    assert world.collectives_entered == 4


def test_a_lost_process_has_done_the_steps_that_all_have_summed():
    """Its last beat may be a second old, and steps short."""
    world, store = several(2), dist.HashStore()
    dog = object.__new__(Watchdog)
    dog._world, dog._store, dog._limits, dog._suspicion, dog._looks = world, store, LIMITS, "", 100
    dog._heard, dog._beats, world.step = [("", 100), (b"[1, 9, 0, 1.0]", 0)], 0, 21
    store.set("beat/1", "[1, 9, 0, 1.0]")
    failure, silent = dog._look()
    assert (failure.rank, failure.step, silent) == (1, 20, [1])


def test_who_comes_to_the_store_of_another_run_waits_for_five_minutes(monkeypatch):
    assert parallel.MEETING.total_seconds() == 300
    monkeypatch.setattr(parallel, "MEETING", timedelta(milliseconds=1))
    with pytest.raises(RuntimeError, match="timeout"):
        World(rank=1, size=2, store=dist.HashStore())


def several(size: int) -> World:
    """One of `size` processes, without the others."""
    world = World()
    world.size, world.hosts = size, [f"host{rank}" for rank in range(size)]
    world.begin_run()
    return world


def test_sequences_that_cannot_be_shared_name_the_nearest_that_can():
    with pytest.raises(ValueError, match=r"batch_tokens=320 is 10 sequences, .* use 256 or 384, or fewer processes: 2"):
        several(4).local_sequences(10, None, 32)
    with pytest.raises(ValueError, match=r"train.micro_batch=4 does not divide the 2 sequences"):
        several(4).local_sequences(8, 4, 32)
    assert several(4).local_sequences(8, 2, 32) == 2
    with pytest.raises(ValueError, match=r"batch_tokens=64 is 2 sequences, .*; use 128, or fewer processes: 2$"):
        several(4).local_sequences(2, None, 32)
    pairs = several(4)
    pairs.arrange(ParallelConfig(context=2))
    assert pairs.local_sequences(6, "auto", 32) == 3, "two groups have sequences of their own"
    for world, size in ((several(2), 2), (pairs, 4)):
        with pytest.raises(
            ValueError, match=f"=2 does not divide the 3 sequences of a step that each of {size} processes"
        ):
            world.local_sequences(6, 2, 32)
    with pytest.raises(ValueError, match=r"micro_batch=2 does not divide the 3 sequences of a step [(]train.batch_tok"):
        several(1).local_sequences(3, 2, 32)
    pairs.arrange(ParallelConfig(data="shard"))
    assert pairs.shards
    alone = World()
    alone.arrange(ParallelConfig(data="shard"))
    assert not alone.shards, "one process has nobody to share with"
    with pytest.raises(
        ValueError,
        match=r"parallel.context=3 does not divide 4, .* torchrun --nproc-per-node 3, or use parallel.context=1",
    ):
        pairs.arrange(ParallelConfig(context=3))


def test_a_process_may_be_as_late_as_its_work_takes(monkeypatch):
    """Without a limit while the first steps are compiled, and for longer between two steps than in one."""
    monkeypatch.setattr(parallel, "sum_over_ranks", lambda terms, group: None)
    world, cpu, patience = several(2), torch.device("cpu"), []
    world._group_for = lambda device: None
    for took_ms in (0.0, 0.0, 1e3, 90e3):
        world.messages.clock.last_ms = took_ms
        world.begin_step(cpu)
        patience.append(world.patience)
        world.sum([], torch.tensor(0.0), [torch.ones(2)])
        patience.append(world.patience)
    in_a_step, between = patience[::2], patience[1::2]
    assert in_a_step == [math.inf, parallel.BETWEEN_STEPS, parallel.IN_A_STEP, 90.0]
    assert between == [parallel.BETWEEN_STEPS] * 4
    assert world.collectives_entered == 4 * 2, "who begins no step is behind, whatever it would wait in"
    world.suspend_timeout()
    assert world.patience == math.inf
    world.begin_step(cpu)
    assert world.patience == parallel.IN_A_STEP
    world.begin_run()
    world.begin_step(cpu)
    assert world.patience == math.inf, "the next run of a sweep is compiled, too"


def test_weights_are_compared_now_and_then(monkeypatch):
    monkeypatch.setattr(parallel, "sum_over_ranks", lambda terms, group: None)
    world, compared = several(2), []
    world._group_for = lambda device: None
    world.messages.check_weights = lambda weights: compared.append(world._sums)
    for _ in range(2 * parallel.CHECK_EVERY + 1):
        world.sum([], torch.tensor(0.0), [torch.ones(2)])
    assert compared == [0, parallel.CHECK_EVERY, 2 * parallel.CHECK_EVERY]
    world.shards = True
    world._sums = 0
    world.sum([], torch.tensor(0.0), [torch.ones(2)])
    assert len(compared) == 3, "each has other rows"


def test_running_out_of_memory_is_nobody_else_s_end():
    """It is said by who ran out, with the advice that a run gives."""
    world = several(2)
    for watchdog in (None, SimpleNamespace(wait_for_the_end=pytest.fail)):
        world.watchdog = watchdog
        with pytest.raises(torch.OutOfMemoryError), world.communicating():
            raise torch.OutOfMemoryError("CUDA out of memory")
    world.watchdog = None
    with pytest.raises(RuntimeError, match=r"^the network is gone$"), world.communicating():
        raise RuntimeError("the network is gone")


@pytest.mark.parametrize("what", ["text", "checkpoint"])
def test_a_process_with_other_files_is_named(tmp_path, what, one_thread):
    """A file of the same name on a disk of its own; nothing else would tell, as all add the same gradients."""
    train(small_run(tmp_path, "train.steps=1"), tmp_path / "first")
    world = several(2)
    world.all_gather = lambda value: [value, value | {what: "0" * 64} if what in (value or ()) else value]
    settings = small_run(tmp_path, f"init_from={tmp_path / 'first'}", "optim.lr=1e-3")
    with pytest.raises(ValueError, match=rf"rank 1 of 2 on host1 has another {what} than rank 0 \(fingerprint 000000"):
        resolve(settings, tmp_path / "run", report=lambda line: None, world=world)


def test_a_slow_process_is_named_once():
    world = several(4)
    said = []
    for step in range(1, 3 * SLOW_STEPS):
        times = [10.0, 10.5, 11.9 if step > 3 else 10.0, 10.0]
        lines = world.messages.read(step, [1.0, *[0.0] * NUM_VOTES, 0.0, *times, *[7.0] * 4])
        said += [(step, line) for line in lines]
    ((step, line),) = said
    assert step == SLOW_STEPS + 3
    assert "rank 2 of 4 on host2" in line
    assert "11.9 ms" in line


def test_the_clock_of_a_gpu_is_read_though_steps_are_queued_ahead(monkeypatch):
    """When a step is queued, the one before it is not over: the time is that of an older one, and never 0 for long."""
    done, made = 0, []

    class Event:
        def __init__(self, enable_timing):
            made.append(self)
            self.number = len(made)

        def record(self):
            pass

        def query(self):
            return self.number <= done

        def elapsed_time(self, later):
            return 100.0 * later.number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, told = StepClock(), []
    for step in range(5):
        done = 2 * (step - 1)  # the device is a step behind, as the loop lets it be
        clock.begin(torch.device("cuda"))
        told.append(clock.end())
    assert told == [0.0, 0.0, 200.0, 400.0, 600.0]


def test_who_votes_and_what_is_agreed():
    world = several(2)
    assert world.messages.verdict is None
    world.messages.read(1, [1.0, *[0.0] * NUM_VOTES, 0.0, 1.0, 1.0, 7.0, 7.0])
    assert world.messages.verdict is None
    world.messages.read(2, [1.0, 0.0, 2.0, *[0.0] * (NUM_VOTES - 2), 0.0, 1.0, 1.0, 7.0, 7.0])
    assert world.messages.verdict == 1
    with pytest.raises(ValueError, match="rank 1 of 2 on host1, step 3: its weights are not those of rank 0"):
        world.messages.read(3, [1.0, *[0.0] * NUM_VOTES, 0.0, 1.0, 1.0, 7.0, math.nextafter(7.0, 8)])


def test_matrices_are_dealt_out_by_cost():
    assert dealt_by_cost([4.0, 1.0, 3.0, 2.0], 2) == [0, 0, 1, 1]
    assert dealt_by_cost([1.0, 1.0, 1.0], 2) == [0, 1, 0]
    assert dealt_by_cost([5.0], 4) == [0]


def test_each_matrix_is_orthogonalized_once(found):
    """Of three stacks three of four processes have one each and one has none; each of two has some."""
    counts = {
        name: [int(out.rpartition("orthogonalized ")[2]) for out in found[name]["out"]]
        for name in ("shard_4", "moved_2")
    }
    assert sorted(counts["shard_4"]) == [0, 8, 8, 8]
    assert sum(counts["moved_2"]) == 3 * (8 - found["moved_4"]["step"])
    assert min(counts["moved_2"]) > 0


def planned(*overrides: str, graphs: bool | None = None) -> Run:
    """A run of two processes with GPUs elsewhere that share weights."""
    world = World(size=2)
    hardware = Hardware(torch.device("cuda"), torch.bfloat16, True, "two GPUs", graphs, world)
    made = settings("parallel.data=shard", "model=gpt2_124m", "train.batch_tokens=32768", "optim=adamw", *overrides)
    return resolve(made, vocab_size=50257, hardware=hardware, world=world)


def test_what_cannot_be_combined_with_shared_weights():
    with pytest.raises(ValueError, match=r"model.name=some/model cannot be sharded; use parallel.data=replicate"):
        planned("model=huggingface", "model.name=some/model")
    with pytest.raises(
        ValueError, match=r"cuda_graphs=true does not work with parallel.data=shard: weights are gathered"
    ):
        planned(graphs=True)
    assert (planned().graphs, planned().graphs_reason) == (False, "weights are gathered in the middle of the step")


def test_the_forecast_of_shared_weights_divides_what_is_kept():
    shared = planned("model.num_layers=3").plan
    alone = replace(shared, hardware=replace(shared.hardware, world=ALONE))
    for part in ("forward", "backward", "optimizer"):
        ours, whole = shared.kinds(part), alone.kinds(part)
        assert ours["optimizer state"] == pytest.approx(whole["optimizer state"] / 2, rel=1e-3)
        assert ours["parameters and batch"] == pytest.approx(whole["parameters and batch"] / 2, rel=0.02)
    blocks, table = 3 * 12 * 768**2, 50304 * 768
    copies = alone.kinds("forward")["activations"] - shared.kinds("forward")["activations"]
    assert copies == 2 * blocks, "in 16 bit, which autocast keeps, and which here are gathered for a block at a time"
    assert shared.kinds("forward")["gathered weights"] == 4 * table + 2 * 2 * blocks // 3


def test_the_forecast_of_several_processes_has_what_they_exchange():
    def kinds(part: str, size: int, optimizer: str = "adamw", shards: bool = False, **changes) -> dict[str, int]:
        world = World(size=size)
        world.shards = shards
        hardware = Hardware(torch.device("cuda"), torch.bfloat16, False, "", world=world)
        config = GPTConfig(2, 16, n_embd=1024, attention="flash", loss="chunked")
        plan = Plan(config, OptimConfig(name=optimizer), hardware, 50257, 1024, sequences=4, micro_batch=2)
        return replace(plan, **changes).kinds(part)

    block, table = 12 * 1024**2, 50304 * 1024
    weights = 4 * (2 * block + table)
    assert "sum over processes" not in kinds("optimizer", 2), "two add in place"
    assert kinds("optimizer", 4)["sum over processes"] == 2 * 4 * PIECE < 2 * weights
    assert kinds("optimizer", 4, "muon")["matrices exchanged"] == 2 * 2 * block
    assert kinds("optimizer", 4, "muon", True)["matrices exchanged"] == 3 * 2 * block
    for part in ("forward", "optimizer"):
        assert kinds(part, 4, "adamw", True)["gradients"] == pytest.approx(weights / 4, rel=1e-6)
    backward = kinds("backward", 4, "adamw", True)
    assert backward["gradients exchanged"] == 2 * 2 * block + 2 * 4 * block
    # of a few tokens the table's gradient, sent and received at the end, is more than the blocks ever need
    few = kinds("backward", 4, "adamw", True, seq_len=16, sequences=1, micro_batch=1)
    assert few["gradients exchanged"] == 3 * 4 * table


def test_no_other_way_to_share_is_accepted():
    for message, overrides in {
        "parallel.data=ddp is not one of replicate, shard": {"data": "ddp"},
        "parallel.context=0 must be at least 1": {"context": 0},
        "parallel.context_method=tree is not one of auto, heads, gather, ring": {"context_method": "tree"},
    }.items():
        with pytest.raises(ValueError, match=message):
            ParallelConfig(**overrides)


def test_who_is_behind_and_goes_on_does_not_hang():
    dog = object.__new__(Watchdog)
    dog._world, dog._limits, dog._late = several(2), LIMITS, [(0, 0)] * 2
    for now, furthest, behind in ((50, 9, 1), (100, 99, 2), (150, 199, 3)):
        assert dog._hanging([[1, 5, furthest, 60.0], [1, 5, behind, 60.0]], now) is None
    failure, silent = dog._hanging([[1, 5, 199, 60.0], [1, 5, 3, 60.0]], 211)
    assert (failure.rank, silent) == (1, [])


def test_weights_that_are_no_numbers_are_no_other_process_s_weights():
    """What is done about them is train.on_nonfinite's matter."""
    messages = several(2).messages
    for checks in ([math.nan, math.nan], [2.0, math.nan], [math.nan, 2.0], [2.0, 2.0]):
        assert messages.read(1, [0.0] * (2 + NUM_VOTES) + [1.0, 1.0] + checks) == []
    with pytest.raises(ValueError, match="its weights are not those of rank 0"):
        messages.read(1, [0.0] * (2 + NUM_VOTES) + [1.0, 1.0, 2.0, 3.0])
