"""Context parallelism: several processes that share each row compute what one does."""

import pickle
import subprocess

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from model import GPTConfig, context
from tests import context_worker
from tests.context_worker import PROCESSES, attention_case, model_case, refusal_case, training_case
from training.context import resolve_method
from training.parallel import ParallelConfig

EXACT = 1e-13  # float64, of the largest value
ROUNDED = 2e-2  # bfloat16
KERNELS = 2e-6  # float32 through the kernels, beside the definition in one process, in float32 too

PLAIN = {"causal": {}, "full": {"causal": False}, "scale": {"scale": 0.4}}
ONLY_EXACT = {
    "window": {"window": (4, -1)},
    "documents": {"packed": True},
    "documents and window": {"packed": True, "window": (2, -1)},
}

CASES = {}
for method in ("heads", "gather", "ring"):
    options = PLAIN if method == "ring" else PLAIN | ONLY_EXACT
    for world in (2, 4) if method == "heads" else (2, 3, 4):
        for name, given in options.items():
            given = {"rows": 2} | given if "packed" not in given else given
            CASES[f"{method} {name}, {world}"] = (world, attention_case, (method,), given)
    CASES[f"{method} of tiled, 2"] = (2, attention_case, (method, "tiled"), {})
    CASES[f"{method} of one, 1"] = (1, attention_case, (method,), {})
for method in ("heads", "gather"):
    CASES[f"{method} of sdpa, 2"] = (2, attention_case, (method, "sdpa"), {})
    CASES[f"{method} compiled, 2"] = (2, attention_case, (method, "naive"), {"compiled": True})
ATTENTION_CASES = list(CASES)
ROUNDED_CASES = [f"{method} in bfloat16, 4" for method in ("heads", "gather", "ring")]
for name in ROUNDED_CASES:
    CASES[name] = (4, attention_case, (name.split()[0], "naive", torch.bfloat16), {})

# with a GPU there is no interpreter for the kernels on a CPU, and test_parts_of_two_gpus instead
FLASH = {f"{method} of flash, 2": {} for method in ("heads", "gather", "ring")} | {
    "ring of flash, scale, 2": {"scale": 0.4},
    # attention's results are kept, and must not become others afterwards
    "ring of flash, recomputed but for attention, 2": {"recomputed": True},
}
FLASH_CASES = [] if torch.cuda.is_available() else list(FLASH)
for name in FLASH_CASES:
    CASES[name] = (2, attention_case, (name.split()[0], "flash", torch.float32), {"chunk": 5} | FLASH[name])

MODEL = {
    "plain": {"rows": 2},
    "recomputed": {"activation_checkpointing": "full"},
    "grouped, QK norm": {"num_kv_heads": 2, "qk_norm": True},
    "window": {"window": 5},
    "documents": {"packed": True},
    "the same twice": {"twice": True, "rows": 2},
}
for method in ("heads", "gather", "ring"):
    for name, changes in MODEL.items():
        if method == "ring" and changes.keys() & {"window", "packed"}:
            continue
        CASES[f"{method} in a model, {name}"] = (2 if "num_kv_heads" in changes else 4, model_case, (method,), changes)
MODEL_CASES = [name for name in CASES if "in a model" in name]

RING_TAKES = (
    "parallel.context_method=ring takes no window, documents or dropout; use parallel.context_method=heads or gather"
)
REFUSED = {
    "ring window": ("ring", {"window": (3, -1)}, RING_TAKES),
    "ring dropout": ("ring", {"dropout_p": 0.1}, RING_TAKES),
    "ring documents": ("ring", {"documents": ()}, RING_TAKES),
    "gather full documents": (
        "gather",
        {"causal": False, "documents": ()},
        "parallel.context_method=gather needs causal=True with a window or documents",
    ),
    "gather full window": (
        "gather",
        {"causal": False, "window": (1, 1)},
        "parallel.context_method=gather needs causal",
    ),
    "ring scale": ("ring", {"scale": -0.5}, "scale is -0.5; with parallel.context_method=ring it must be positive"),
    "ring scale of 0": ("ring", {"scale": 0.0}, "scale is 0.0; with parallel.context_method=ring it must be positive"),
    "heads 4": ("heads", {}, "parallel.context=4 does not divide 2 KV heads; use parallel.context_method=gather"),
}
for name, (method, given, _) in REFUSED.items():
    CASES[f"refused {name}"] = (PROCESSES, refusal_case, (method,), given)

SHORT = ["train.steps=3", "train.log_every=1", "train.eval_every=2", "train.sample_tokens=4", "optim.lr=3e-4"]
RUNS = {  # what all have, and what those of four processes have beside it
    "rows and tokens dealt": ([*SHORT, "train.micro_batch=2"], ["parallel.context=2"], ["parallel.context=2"]),
    "documents": (
        [
            *(*SHORT, "train.batch_tokens=64", "train.micro_batch=1"),
            *("data.document_mask=true", "model.attention=naive", "model.window=9"),
        ],
        ["parallel.context=4", "model.activation_checkpointing=full"],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, quick_python):
    """What came of each case, in each of its processes."""
    folder = tmp_path_factory.mktemp("context")
    training = {name: (PROCESSES, training_case, (folder / name, *runs), {}) for name, runs in RUNS.items()}
    (folder / "cases").write_bytes(pickle.dumps(CASES | training))
    program = "import sys; from tests.context_worker import main; main(sys.argv[1])"
    done = subprocess.run([quick_python, "-c", program, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    each = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(PROCESSES)]
    return {name: [results[name] for results in each if name in results] for name in CASES | RUNS}


GPU_CASES = {
    f"{method} {name}": (2, context_worker.gpu_case, (method,), options)
    for method in ("heads", "gather", "ring")
    for name, options in {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": (200, -1)},
        "documents": {"packed": True},
        "compiled": {"compiled": True},
    }.items()
    if method != "ring" or name in ("causal", "full")
}


@pytest.mark.gpu
def test_parts_of_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = tmp_path, store.port, GPU_CASES, 2, "nccl"
    mp.start_processes(context_worker.work, arguments, nprocs=2, start_method="spawn")
    for rank in range(2):
        errors = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert all(error <= 1 for error in errors.values()), errors


def worst(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(result[name] for result in results) for name in results[0]}


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_parts_are_those_of_one_process(found, case):
    errors = worst(found[case])
    assert {"o", "dq", "dk", "dv"} <= errors.keys()
    assert all(error < EXACT for error in errors.values()), errors


@pytest.mark.parametrize("case", ROUNDED_CASES)
def test_parts_in_16_bits(found, case):
    """What was summed in 32 has the dtype of q, k and v in the end: each process has seen to that."""
    errors = worst(found[case])
    assert all(error < ROUNDED for error in errors.values()), errors


@pytest.mark.parametrize("case", FLASH_CASES)
def test_parts_through_our_kernels(found, case):
    errors = worst(found[case])
    assert all(error < KERNELS for error in errors.values()), errors
    if case.startswith("heads"):  # the same calls for other heads: the same bits
        assert set(errors.values()) == {0.0}


@pytest.mark.parametrize("case", MODEL_CASES)
def test_a_model_over_parts_of_its_rows(found, case):
    """Positions, loss, evaluation and the sum of the weights' gradients; a second time the same bits."""
    errors = worst(found[case])
    assert {"loss", "evaluated", "embedding.weight"} < errors.keys()
    most = dict.fromkeys(errors, EXACT) | {"loss": 2e-7, "evaluated": 2e-7}  # losses are float32 in any model
    most = dict.fromkeys(errors, 0.0) if "twice" in case else most
    assert all(error <= most[name] for name, error in errors.items()), errors


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_shares_rows(found, name):
    """Its losses, gradient norms and evaluations are one process's but for rounding; the same run has the same bits."""
    alone, *shared = found[name][0]
    for run in shared:
        for line, expected in zip(run["lines"], alone["lines"], strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
    assert all(run == shared[0] for run in shared)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_way_cannot_do_is_refused(found, name):
    for message in found[f"refused {name}"]:
        assert message.startswith(REFUSED[name][2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_sent_is_packed_from_any_layout(dtype):
    """By eight bytes only where all of its rows begin at such."""
    odd, even = torch.randn(3, 5, 21).to(dtype), torch.randn(3, 5, 24).to(dtype)
    whole = (even[:, 1:, :20], even.transpose(0, 1)[..., :16])
    for x in (*whole, odd[..., :8], even[..., 1:9], even[..., :7], even[..., ::3]):
        packed = context._packed(x)
        assert packed.is_contiguous()
        assert torch.equal(packed, x)


@pytest.mark.parametrize("method", ["heads", "gather", "ring"])
def test_the_parts_of_all_ranks_are_all_tokens(method):
    """Each stored by itself, in any dimension."""
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    for y, dim in ((x, 1), (x.transpose(1, 2), 2)):
        parts = [context.part_of(y, rank, 4, method, dim=dim) for rank in range(4)]
        assert all(part.is_contiguous() and part.size(dim) == 6 for part in parts)
        assert torch.equal(torch.cat(parts, dim).sort(dim).values, y)


def test_documents_of_chunks_name_what_a_chunk_sees():
    """Also how long one may be: a kernel has work for as much, whether it is there or not."""
    found = context.documents_of_chunks(torch.tensor([0, 3, 14, 24], dtype=torch.int32), 24, rank=1, world_size=2)
    assert [tuple(x.tolist() for x in chunk.cu_seqlens) for chunk in found] == [
        ([0, 0, 6, 6], [0, 3, 12, 12]),  # tokens 6 to 11
        ([0, 0, 2, 6], [0, 3, 14, 18]),  # tokens 12 to 17
    ]
    assert [chunk.max_seqlen for chunk in found] == [(6, 12), (6, 18)]


def resolved(asked="auto", world=2, seq_len=16, micro_batch=1, document_mask=False, **model) -> tuple[str, str]:
    model = GPTConfig(**{"num_heads": 4, "n_embd": 64, "attention": "naive", **model})
    parallel = ParallelConfig(context=world, context_method=asked)
    return resolve_method(parallel, model, torch.float32, seq_len, micro_batch, document_mask)


def test_auto_takes_heads_where_it_can():
    assert resolved() == ("heads", "auto: 2 divides the 4 KV heads")
    assert resolved(world=4, seq_len=24, num_kv_heads=2) == ("gather", "auto: 4 does not divide the 2 KV heads")
    assert resolved("ring") == ("ring", "asked for by name")
    assert resolved(micro_batch=2) == resolved(), "rows are as many as they like, where documents do not cut them"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asked": "rings"}, "parallel.context_method=rings is not one of auto, heads, gather, ring"),
        ({"seq_len": 1}, "data.seq_len=1 cannot be cut into 2 equal pieces.*; use data.seq_len=2"),
        ({"seq_len": 15}, "data.seq_len=15 cannot be cut into 2 equal pieces.*; use data.seq_len=16"),
        (
            {"asked": "gather", "seq_len": 18},
            "data.seq_len=18 cannot be cut into 4 equal pieces.*; use data.seq_len=16",
        ),
        ({"asked": "heads", "world": 4, "num_kv_heads": 2}, "to divide the model's 2 KV heads; use .*=gather"),
        (
            {"document_mask": True, "micro_batch": 2},
            "train.micro_batch=2 is more than one row.*; use train.micro_batch=1",
        ),
        ({"mask": "prefix:4"}, "model.mask=prefix:4 needs whole rows and parallel.context=2 cuts them; use 1"),
        ({"asked": "ring", "window": 4}, "ring takes no model.window; use parallel.context_method=gather"),
        ({"asked": "ring", "document_mask": True}, "ring takes no data.document_mask; use"),
        ({"asked": "ring", "attention_dropout": 0.1}, "ring takes no model.attention_dropout; use"),
        (
            {"asked": "ring", "attention": "sdpa"},
            "ring cannot run: lse in float32 is not supported by sdpa; use model.attention=fl",
        ),
    ],
)
def test_what_cannot_be_combined_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        resolved(**options)
