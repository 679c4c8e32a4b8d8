"""MosaicBERT's code with our attention against its own PyTorch path, by a stand-in of ours (scripts/mosaicbert.py)."""

import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from model import mosaicbert
from scripts import mosaicbert as code
from scripts.bench import mosaicbert as bench
from training.hardware import HardwareConfig

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (21, 4, 15)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def in_pytorch(monkeypatch):
    """What a CPU without Triton's interpreter runs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(mosaicbert, "flash_attention_varlen", kernels.tiled_attention_varlen)


def bert(heads=4, seed=0, **changed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 50, "hidden_size": 16 * heads, "num_attention_heads": heads, "num_hidden_layers": 2,
             "intermediate_size": 64, "alibi_starting_size": 8}  # fmt: skip
    return code.BertModel(code.dnabert2_config(**sizes | changed)).eval().to(DEVICE)


def batch(lengths=LENGTHS):
    most = max(lengths)
    ids = torch.randint(50, (len(lengths), most), generator=torch.Generator().manual_seed(1))
    return ids.to(DEVICE), (torch.arange(most) < torch.tensor(lengths)[:, None]).long().to(DEVICE)


def step(model):
    model.zero_grad()
    ids, mask = batch()
    hidden = model(ids, mask)
    (hidden * torch.linspace(-1, 1, hidden.numel(), device=DEVICE).view_as(hidden)).sum().backward()
    return hidden.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("heads", [4, 12])  # a power of two, and DNABERT-2's
def test_equal_to_its_pytorch_path(heads, in_pytorch):
    model = bert(heads)
    theirs = step(model)
    ours = step(mosaicbert.patch(model))
    assert (theirs[0] - ours[0]).abs().max() <= 1e-5
    assert (theirs[1] - ours[1]).norm() <= 1e-5 * theirs[1].norm()


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for a CPU")
def test_equal_in_the_interpreter():
    model = bert(num_hidden_layers=1)
    with torch.no_grad():
        theirs = model(*batch((17, 4)))
        assert (theirs - mosaicbert.patch(model)(*batch((17, 4)))).abs().max() <= 1e-5


@pytest.mark.gpu
def test_bfloat16_is_as_near_as_its_own():
    exact, own = (step(bert(12, hidden_size=768).to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    ours = step(mosaicbert.patch(bert(12, hidden_size=768).to(torch.bfloat16)))
    for right, theirs, found in zip(exact, own, ours, strict=True):
        assert (found - right).norm() <= 2 * (theirs - right).norm()


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not function.is_view:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_memory_is_linear(monkeypatch):
    """No tensor with N x N numbers, but for what attention itself would make."""
    monkeypatch.setattr(mosaicbert, "flash_attention_varlen", lambda q, *_, **__: q)
    model = mosaicbert.patch(bert(intermediate_size=16))
    with torch.no_grad(), Largest() as seen:
        model(*batch((600, 300)))
    assert seen.numbers < 600 * 600


def test_dropout_in_training_alone(in_pytorch):
    model = mosaicbert.patch(bert(attention_probs_dropout_prob=0.4))
    with torch.no_grad():
        first, second = model(*batch()), model(*batch())
        model.train()
        third, fourth = model(*batch()), model(*batch())
    assert torch.equal(first, second)
    assert not torch.equal(third, fourth)


def test_other_code_is_refused():
    with pytest.raises(ValueError, match="Linear has no BertUnpadSelfAttention and BertEncoder of MosaicBERT's code"):
        mosaicbert.patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear has no BertUnpadSelfAttention"):
        mosaicbert.patch(nn.Linear)


def test_other_slopes_are_refused():
    model = bert()
    model.encoder.alibi *= 2
    with pytest.raises(ValueError, match=r"this model's ALiBi slopes run from 0.5000 to .*ours from 0.2500"):
        mosaicbert.patch(model)


def test_a_table_in_16_bits_is_known():
    """Slopes of 12 heads are no numbers of bfloat16."""
    model = bert(12)
    model.encoder.alibi = model.encoder.alibi.bfloat16()
    mosaicbert.patch(model)
    assert model.encoder.alibi.shape == (1, 1, 1, 1)


def test_transformers_5_loads_it_only_as_a_patched_class(tmp_path, monkeypatch, in_pytorch):
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")

    class Config(transformers.PretrainedConfig):
        model_type = "mosaicbert-stand-in"

        def __init__(self, **given):
            for key, value in vars(bert_sizes).items():
                setattr(self, key, given.pop(key, value))
            super().__init__(**given)

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.bert = code.BertModel(config)
            self.post_init()

        def _init_weights(self, module): ...
        def forward(self, *given):
            return self.bert(*given)

    bert_sizes = code.dnabert2_config(vocab_size=50, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    model = Model(Config()).eval().to(DEVICE)
    with torch.no_grad():
        theirs = model(*batch())
    model.save_pretrained(tmp_path)
    if transformers.__version__ >= "5":
        with pytest.raises(RuntimeError, match="meta"):
            Model.from_pretrained(tmp_path)
    else:  # there a model can be loaded first
        with torch.no_grad():
            assert (mosaicbert.patch(Model.from_pretrained(tmp_path))(*batch()) - theirs).abs().max() <= 1e-5
    for name, method in (("BertUnpadSelfAttention", "forward"), ("BertEncoder", "rebuild_alibi_tensor")):
        kept = getattr(getattr(code, name), method)
        monkeypatch.setattr(getattr(code, name), method, kept)  # put back at the end
    mosaicbert.patch(code.BertModel)
    loaded = Model.from_pretrained(tmp_path).eval().to(DEVICE)
    with torch.no_grad():
        assert (loaded(*batch()) - theirs).abs().max() <= 1e-5


@pytest.mark.usefixtures("smoke_test")
def test_each_part_and_length_has_a_row_for_each_attention(tmp_path, monkeypatch):
    hardware = HardwareConfig(device="cpu", dtype="float32", num_threads=1)
    settings = bench.MosaicBertBenchSettings([8, 16], all_parts_at=8, batch_tokens=16, num_layers=1, hardware=hardware)
    for module in (mosaicbert, bench):
        monkeypatch.setattr(module, "flash_attention_varlen", kernels.tiled_attention_varlen)
    bench.main.__wrapped__(settings, tmp_path)
    rows = json.loads((tmp_path / "bench_mosaicbert.json").read_text())["rows"]
    cases = [(8, lengths, part) for lengths in ("padded", "full") for part in bench.PARTS]
    cases += [(16, "full", part) for part in ("forward", "step")]  # one row, which is full
    expected = {(*case, name) for case in cases for name in ("naive", "sdpa", "flash")}
    expected -= {(16, "full", "step", "naive")}
    expected |= {(8, lengths, part, "free") for lengths in ("padded", "full") for part in bench.NETWORK}
    assert {(row["seq_len"], row["lengths"], row["part"], row["attention"]) for row in rows} == expected
    assert all(row["tokens_per_second"] > 0 and row["p99_ms"] >= row["ms"] for row in rows)
    assert {(row["seq_len"], row["lengths"], row["tokens"]) for row in rows} == {
        (8, "padded", 8 + 1), (8, "full", 16), (16, "full", 16),
    }  # fmt: skip
    sdpa = {(row["seq_len"], row["lengths"], row["part"]): row["ms"] for row in rows if row["attention"] == "sdpa"}
    assert all(row["of_sdpa"] == sdpa[row["seq_len"], row["lengths"], row["part"]] / row["ms"] for row in rows)
    assert (tmp_path / "bench_mosaicbert.png").stat().st_size > 0


def test_an_unknown_attention_is_refused_by_its_key():
    with pytest.raises(ValueError, match=r"^attention=some is not one of naive, sdpa, flash, free"):
        bench.MosaicBertBenchSettings(attention=["some"])


@pytest.mark.parametrize("lengths", ["padded", "full"])
def test_what_is_timed_computes_the_same(lengths, in_pytorch):
    settings = bench.MosaicBertBenchSettings(attention=["naive", "sdpa", "flash"], num_layers=1)
    found = []
    ids, mask = (x.to(DEVICE) for x in bench.batch(24, 3, lengths))
    assert (mask.sum(1).tolist() == [24, 24, 24]) == (lengths == "full")
    for _, model in bench.models(settings, 24, torch.device(DEVICE)):
        with torch.no_grad():
            found.append(model(ids, mask))
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 2e-5
