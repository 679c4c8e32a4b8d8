"""The memory forecast against what the model's operators really return, and against peaks measured on an H200."""

import gc
import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import why_not
from kernels.fused.rotary import rotary_fwd
from model import GPT, GPTConfig
from tests.live_memory import measured
from training.hardware import HardwareConfig, set_up
from training.memory import CUBLAS_BYTES, GIB, Work, block_activations, forecast, weight_copies
from training.optimizer import OptimConfig, Optimizer
from training.step import training_step

EVIDENCE = Path(__file__).resolve().parent.parent / ".github" / "evidence" / "training"
VOCAB = 1000

SHAPES = {
    "gelu": {},
    "swiglu, shared heads": {"mlp": "swiglu", "num_kv_heads": 2},
    "relu2, a head of its own": {"mlp": "relu2", "tie_embeddings": False},
    "normed q and k, dropout": {"qk_norm": True, "dropout": 0.1},
    "pointwise": {"activation_checkpointing": "pointwise"},
    "pointwise swiglu": {"activation_checkpointing": "pointwise", "mlp": "swiglu"},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "naive": {"attention": "naive"},
    "naive, shared heads": {"attention": "naive", "num_kv_heads": 2},
    "naive with dropout": {"attention": "naive", "attention_dropout": 0.1},
    "naive full": {"attention": "naive", "activation_checkpointing": "full"},
}


@pytest.fixture
def fake_cuda(monkeypatch):
    """Make PyTorch and our kernels believe that fake tensors of device cuda can be computed with."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr("kernels.support._flash_device_reason", lambda *_: None)
    monkeypatch.setattr("model.gpt.rotate_and_split", rotary_fwd)  # the operator on a CPU too


def small(**changes) -> GPTConfig:
    return GPTConfig(
        **{"num_layers": 3, "num_heads": 4, "n_embd": 128, "attention": "flash", "loss": "plain"} | changes
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_forward_keeps_is_what_the_formulas_say(shape, dtype, fake_cuda):
    """Byte by byte: layers by kind, copies of the weights, the head; the plain loss keeps logits and statistics."""
    config = small(**SHAPES[shape])
    work = Work(config, VOCAB, 64, 8, dtype=dtype)
    found = measured(config, VOCAB, 64, 8, dtype, OptimConfig(), "cuda")
    terms = forecast(work).moments["the loss"]
    dlogits = work.tokens * (dtype.itemsize * work.columns + 4)  # and the losses of the rows, by then gone
    kept = sum(terms[name] for name in ("activations", "16-bit weights", "logits and loss")) - dlogits
    assert found["forward"] - found["held"] == kept + 4  # and the loss itself


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", ["gelu", "swiglu, shared heads", "pointwise", "full", "selective", "every second", "naive", "naive full"]
)
@pytest.mark.parametrize("vocab_size", [64, 5000])
def test_the_peak_of_a_whole_step_is_within_ten_percent(shape, dtype, vocab_size, fake_cuda):
    """On CPU tensors, whose backward runs everywhere; with a small vocabulary the blocks are the fullest moment."""
    config = small(**SHAPES[shape])
    seq_len = 256
    found = measured(config, vocab_size, seq_len, 16, dtype, OptimConfig(), "cpu")
    predicted = forecast(Work(config, vocab_size, seq_len, 16, dtype=dtype, device="cpu")).peak
    peak = max(found[name] for name in ("forward_peak", "backward_peak", "optimizer_peak"))
    print(shape, dtype, vocab_size, predicted / peak)
    assert predicted == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("mlp", "mode"),
    [
        ("swiglu", "none"),
        ("swiglu", "selective"),
        pytest.param("gelu", "none", marks=pytest.mark.slow),
        pytest.param("gelu", "pointwise", marks=pytest.mark.slow),
        pytest.param("swiglu", "pointwise", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_keeps_what_the_formulas_say(mlp, mode):
    """What the partitioner saves in bf16, by autograd's own hooks: what a second layer adds."""
    kept = {}
    for num_layers in (1, 2):
        torch.compiler.reset()
        config = small(num_layers=num_layers, mlp=mlp, attention="sdpa", loss="chunked", activation_checkpointing=mode)
        model = GPT(config, VOCAB, 64)
        forward = torch.compile(model, backend="aot_eager_decomp_partition")
        storages = {}

        def pack(x, storages=storages):
            storages[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
            return x

        tokens = torch.zeros(8, 64, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            forward(tokens, tokens)
        weights = {p.data_ptr() for p in model.parameters()}
        kept[num_layers] = sum(x.untyped_storage().nbytes() for at, x in storages.items() if at not in weights)
    work = Work(config, VOCAB, 64, 8, device="cpu", compiled=True)
    # without the rotary kernel q and k are turned into memory of their own, and v keeps what they came from
    turned = 0 if mode == "selective" else work.tokens * 2 * (config.num_heads + config.kv_heads) * config.head_dim
    predicted = sum(forecast(work).layers[0].values()) + weight_copies(work) / 2 + turned
    assert kept[2] - kept[1] == pytest.approx(predicted, rel=1e-3)


@pytest.mark.slow
def test_compiled_selective_brings_back_q_k_and_v_after_the_mlps_backward(monkeypatch):
    """The forecast of its peak rests on this order."""
    if reason := why_not("flash", torch.float32, device="cpu", head_dim=16):
        pytest.skip(reason)
    monkeypatch.setattr("model.gpt.rotate_and_split", rotary_fwd)
    torch.compiler.reset()
    config = small(num_layers=1, attention="sdpa", activation_checkpointing="selective")
    model = GPT(config, VOCAB, 16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    loss = torch.compile(model)(tokens, tokens)
    with Calls() as calls:  # not around what is compiled
        loss.backward()
    (rotation,) = (at for at, (name, _) in enumerate(calls) if name == "flashgpt.rotary_fwd.default")
    # the product with `up` again, and the gradient of what it returned
    again, gradient = (at for at, call in enumerate(calls) if call == ("aten.mm.out", (16, 512)))
    assert again < gradient < rotation


class Calls(TorchDispatchMode, list):
    """Names of all operators and the shapes of what they returned, in order."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.append((str(function), tuple(out.shape) if isinstance(out, torch.Tensor) else None))
        return out


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizers_state(name, fake_cuda):
    config = small()
    found = measured(config, VOCAB, 16, 2, torch.float32, OptimConfig(name=name), "cpu")
    terms = forecast(Work(config, VOCAB, 16, 2, optimizer=name, dtype=torch.float32, device="cpu")).terms
    inputs_and_tables = 2 * 16 * 32 * 4 + 2 * 16 * 8
    states = found["held"] - inputs_and_tables - terms["parameters"]
    assert states == pytest.approx(terms["optimizer state"], abs=1000)  # a step counter each


def test_parameters_are_the_models():
    for changes in ({}, {"mlp": "swiglu", "num_kv_heads": 2, "tie_embeddings": False}):
        config = small(**changes, attention="sdpa")
        assert Work(config, VOCAB, 64, 1).weights == GPT(config, VOCAB, 64).num_parameters()


@pytest.mark.parametrize(("record", "rows_at_least"), [("grid", 8), ("compiled", 8), ("checkpointing", 5)])
def test_measured_peaks_are_forecast(record, rows_at_least):
    """The 124M model, bf16, as the records of scripts.bench_training have it."""
    report = json.loads((EVIDENCE / record / "bench_training.json").read_text())
    rows = [row for row in report["rows"] if "peak_memory_gib" in row]
    if record == "grid":  # selective kept attention alone then
        rows = [row for row in rows if row["activation_checkpointing"] != "selective"]
    assert len(rows) >= rows_at_least
    for row in rows:
        config = GPTConfig(
            attention=row["attention"].split("_")[0], loss=row.get("loss", "plain"),
            activation_checkpointing=row["activation_checkpointing"],
        )  # fmt: skip
        micro_batches = row["batch_tokens"] // row["seq_len"] // row["micro_batch"]
        work = Work(
            config,
            50257,
            row["seq_len"],
            row["micro_batch"],
            micro_batches,
            compiled=", compiled" in report["hardware"],
        )
        assert forecast(work).peak / GIB == pytest.approx(row["peak_memory_gib"], rel=0.1), row


def test_micro_batches_hold_gradients_and_less_of_all_else():
    one, many = (forecast(Work(small(), VOCAB, 64, *split)) for split in ((8, 1), (2, 4)))
    assert many.moments["the loss"]["gradients"] == many.terms["parameters"]
    assert one.moments["the loss"]["gradients"] == 0
    assert sum(map(sum, (t.values() for t in one.layers))) == 4 * sum(map(sum, (t.values() for t in many.layers)))


def test_the_chunked_loss_of_the_124m_model_needs_a_tenth_of_the_plain_ones():
    plain, chunked = (
        forecast(Work(GPTConfig(attention="flash", loss=loss), 50257, 1024, 64)).moments["the loss"]["logits and loss"]
        for loss in ("plain", "chunked")
    )
    assert chunked < plain / 10
    assert plain / GIB == pytest.approx(12.4, abs=0.1)


def test_a_bigger_batch_changes_only_what_grows_with_it():
    few, many = (block_activations(Work(small(attention="naive"), VOCAB, 64, rows)) for rows in (2, 4))
    assert {kind: 2 * size for kind, size in few.items() if kind != "scores"} == {
        kind: size for kind, size in many.items() if kind != "scores"
    }
    assert CUBLAS_BYTES == 64 * 2**20


GPT2 = {"num_layers": 12, "num_heads": 12, "n_embd": 768, "attention": "flash"}
MEDIUM = {"num_layers": 24, "num_heads": 16, "n_embd": 1024, "attention": "flash"}
ON_GPU = {  # model, seq_len, micro_batch, micro_batches; hardware, optimizer and vocabulary that differ
    "124M": (GPT2, 1024, 32, 1, {}),
    "124M, plain loss": (GPT2 | {"loss": "plain"}, 1024, 32, 1, {}),
    "124M, 65,536 tokens, pointwise": (GPT2 | {"activation_checkpointing": "pointwise"}, 1024, 64, 1, {}),
    "124M, 4 micro-batches": (GPT2, 1024, 8, 4, {}),
    "124M, full": (GPT2 | {"activation_checkpointing": "full"}, 4096, 16, 1, {}),
    "124M, selective": (GPT2 | {"activation_checkpointing": "selective"}, 16384, 4, 1, {}),
    "124M, naive": (GPT2 | {"attention": "naive"}, 1024, 16, 1, {}),
    "124M, naive, full": (GPT2 | {"attention": "naive", "activation_checkpointing": "full"}, 2048, 16, 1, {}),
    "124M, sdpa": (GPT2 | {"attention": "sdpa"}, 1024, 32, 1, {}),
    "124M, float32": (GPT2, 1024, 16, 1, {"dtype": "float32"}),
    "124M, Muon": (GPT2, 1024, 8, 1, {"optimizer": "muon"}),
    "SwiGLU, shared heads, normed, dropout": (
        GPT2 | {"mlp": "swiglu", "num_kv_heads": 4, "qk_norm": True, "dropout": 0.1}, 2048, 16, 1, {},
    ),
    "350M": (MEDIUM, 1024, 16, 1, {}),
    "350M, pointwise": (MEDIUM | {"activation_checkpointing": "pointwise"}, 8192, 2, 1, {}),
    "4 layers, compiled": (GPT2 | {"num_layers": 4}, 1024, 32, 1, {"compile": True}),
    "4 layers, compiled, pointwise": (
        GPT2 | {"num_layers": 4, "activation_checkpointing": "pointwise"}, 1024, 64, 1, {"compile": True},
    ),
    "4 layers, compiled, full": (
        GPT2 | {"num_layers": 4, "activation_checkpointing": "full"}, 1024, 64, 1, {"compile": True},
    ),
    # with few words the last MLP's backward is fuller than the loss
    "4 layers, compiled, selective": (
        GPT2 | {"num_layers": 4, "activation_checkpointing": "selective"}, 1024, 64, 1,
        {"compile": True, "vocab_size": 8192},
    ),
    "4 layers, compiled, SwiGLU": (GPT2 | {"num_layers": 4, "mlp": "swiglu"}, 1024, 32, 1, {"compile": True}),
    "4 layers, compiled, selective, SwiGLU": (
        GPT2 | {"num_layers": 4, "activation_checkpointing": "selective", "mlp": "swiglu"}, 4096, 16, 1,
        {"compile": True, "vocab_size": 8192},
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_measured_peaks_on_this_gpu_are_within_ten_percent(name):
    """`pytest tests/test_memory.py -m gpu -s` prints forecast, peak of three steps, and their ratio."""
    changes, seq_len, micro_batch, micro_batches, other = ON_GPU[name]
    gc.collect()
    torch.compiler.reset()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # of other tests
    hardware = set_up(HardwareConfig(dtype=other.get("dtype", "auto"), compile=other.get("compile", False)))
    config, optimizer_name = GPTConfig(**{"loss": "chunked"} | changes), other.get("optimizer", "adamw")
    vocab_size = other.get("vocab_size", 50257)
    shape = (vocab_size, seq_len, micro_batch, micro_batches)
    work = Work(config, *shape, optimizer_name, hardware.dtype, compiled=hardware.compile)
    model = GPT(config, vocab_size, seq_len, device=hardware.device)
    optimizer = Optimizer(model, OptimConfig(name=optimizer_name))
    forward = torch.compile(model, dynamic=False) if hardware.compile else model
    tokens = torch.randint(vocab_size, (2, micro_batch * micro_batches, seq_len), device=hardware.device)
    for _ in range(3):
        training_step(forward, optimizer, *tokens, micro_batch, hardware)
    peak, found = torch.cuda.max_memory_allocated() - before, forecast(work)
    print(f"\n{name}: forecast {found.peak / GIB:.2f} GiB ({found.fullest}), measured {peak / GIB:.2f} GiB, ", end="")
    print(f"ratio {found.peak / peak:.3f}")
    assert found.peak == pytest.approx(peak, rel=0.1)
