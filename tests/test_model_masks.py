"""What the model sees: sliding windows, documents that do not see each other, dropout, and who refuses them."""

import itertools
import pickle

import pytest
import torch

from data import document_starts
from kernels import place_documents
from model import GPT, GPTConfig, resolve_attention, resolve_model
from model.masks import Pattern, mask_mod
from model.positions import positions_in
from scripts.causality import probe
from tests.runs import settings, small_run, told
from train import train
from training.hardware import Hardware
from training.run import resolve
from training.step import packed_rows

VOCAB, SEQ_LEN, END = 20, 24, 0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpt(attention: str, **changes) -> GPT:
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "n_embd": 32}
    config = GPTConfig(**sizes, attention=attention, **{"loss": "plain"} | changes)
    return GPT(config, VOCAB, SEQ_LEN, device=DEVICE, generator=torch.Generator().manual_seed(0))


def packed_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens (3, SEQ_LEN) with documents that end inside, at an edge, and one after the other; their cu_seqlens."""
    tokens = torch.randint(1, VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    tokens[0, 7] = tokens[1, 0] = tokens[1, 1] = tokens[2, 5] = tokens[2, -1] = END
    starts = document_starts(tokens, END)
    return tokens.to(DEVICE), starts, packed_rows(starts, 0, 3, SEQ_LEN, DEVICE)["cu_seqlens"]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attention", ["naive", "tiled", "flash"])
def test_a_packed_document_is_as_if_alone(attention, window):
    """Logits and gradients of a batch with cu_seqlens are those of each document in a forward of its own."""
    model = gpt(attention, window=window)
    tokens, _, cu_seqlens = packed_batch()
    targets = tokens.roll(-1, 1)
    loss = model(tokens, targets, cu_seqlens=cu_seqlens)
    packed = torch.autograd.grad(loss, list(model.parameters()))
    flat, flat_targets = tokens.flatten(), targets.flatten()
    bounds = cu_seqlens.tolist()
    alone = sum(model(flat[None, a:b], flat_targets[None, a:b]) for a, b in itertools.pairwise(bounds))
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-4)
    for a, b in zip(packed, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert model(tokens, cu_seqlens=cu_seqlens).shape == (3, SEQ_LEN, VOCAB)


@pytest.mark.parametrize("way", ["assign", "to_empty", "there and back"])
def test_a_model_whose_weights_were_on_meta_has_its_mask(way):
    """It had none, and saw what follows."""
    model, tokens = gpt("naive", mask="prefix:4"), torch.randint(1, VOCAB, (1, SEQ_LEN), device=DEVICE)
    expected = model(tokens)
    if way == "there and back":
        other = gpt("naive", mask="prefix:4").to("meta")
    else:
        other = GPT(model.config, VOCAB, SEQ_LEN, device="meta")
    if way == "to_empty":
        other.to_empty(device=DEVICE)
    other.load_state_dict(model.state_dict(), assign=way != "to_empty")
    assert torch.equal(other(tokens), expected)


def test_without_the_mask_documents_see_each_other():
    """Guards the test above: the same batch without cu_seqlens gives another loss."""
    model = gpt("naive")
    tokens, _, cu_seqlens = packed_batch()
    with torch.no_grad():
        assert abs(model(tokens, tokens) - model(tokens, tokens, cu_seqlens=cu_seqlens)) > 1e-2


def test_positions_begin_anew_in_each_document():
    cu_seqlens = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    assert positions_in(cu_seqlens, 8).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_rows_can_be_taken_out_of_a_batch():
    """A micro-batch has the documents of its rows."""
    tokens, starts, _ = packed_batch()
    for first, rows in ((0, 1), (1, 2), (2, 1)):
        part = packed_rows(starts, first, rows, SEQ_LEN, DEVICE)["cu_seqlens"]
        expected = document_starts(tokens[first : first + rows].cpu(), END).tolist()
        assert part.tolist() == [*expected, rows * SEQ_LEN]
    assert packed_rows(None, 0, 1, SEQ_LEN, DEVICE) == {}


@pytest.mark.parametrize("attention", ["naive", "tiled", "flash"])
def test_a_window_hides_what_is_further_back(attention):
    """With window w and two layers, logits depend on the last 2 (w - 1) + 1 tokens and on no other."""
    model = gpt(attention, window=4)
    tokens = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with torch.no_grad():
        expected = model(tokens)[0, -1]
        for position, seen in ((SEQ_LEN - 8, False), (SEQ_LEN - 7, True)):
            changed = tokens.clone()
            changed[0, position] = changed[0, position] % (VOCAB - 1) + 1
            assert torch.equal(model(changed)[0, -1], expected) != seen


def test_a_window_holds_in_the_kv_cache():
    model = gpt("naive", window=4).eval()
    tokens = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    cache = model.make_cache(1)
    cache.allocate(0)
    cache.extend([0], SEQ_LEN)
    with torch.no_grad():
        steps = [model(tokens[:, i : i + 1], kv_cache=cache) for i in range(SEQ_LEN)]
        torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=1e-4, atol=1e-4)


def test_one_compiled_model_serves_every_number_of_documents():
    model = gpt("flash")
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for seed in range(3):
        tokens = torch.randint(0, 6, (2, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
        documents = packed_rows(document_starts(tokens, END), 0, 2, SEQ_LEN, DEVICE)
        tokens = tokens.to(DEVICE)
        torch.testing.assert_close(compiled(tokens, tokens, **documents), model(tokens, tokens, **documents))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_attention_dropout_is_one_mask_for_all_backends(mode):
    """The seed of a call comes from torch's generator, so the same step drops the same pairs, recomputed or not."""
    tokens, _, _ = packed_batch()
    tokens = tokens[:1]

    def gradients(attention: str, mode: str = "none", dropout: float = 0.3) -> list[torch.Tensor]:
        model = gpt(attention, attention_dropout=dropout, activation_checkpointing=mode).train()
        torch.manual_seed(5)
        loss = model(tokens, tokens.roll(-1, 1))
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    expected = gradients("naive")
    for attention in ("tiled", "flash"):
        for a, b in zip(gradients(attention, mode), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert abs(gradients("naive", dropout=0.0)[0] - expected[0]) > 1e-3
    model = gpt("naive", attention_dropout=0.3).eval()
    assert torch.equal(model(tokens), gpt("naive").eval()(tokens))
    with pytest.raises(ValueError, match="attention=sdpa cannot run: dropout in float32 is not supported"):
        resolve_model(GPTConfig(attention="sdpa", attention_dropout=0.3), "cpu", torch.float32)
    with pytest.raises(ValueError, match="dropout in float32 is not supported by sdpa"):
        gpt("sdpa", attention_dropout=0.3)(tokens)


def test_refusals_come_from_the_support_matrix():
    features = GPTConfig(window=5).attention_features(document_mask=True)
    with pytest.raises(ValueError, match=r"attention=sdpa cannot run: window with varlen in float32 is not supported"):
        resolve_attention("sdpa", "cpu", torch.float32, 64, features)
    name, reason = resolve_attention("auto", "cpu", torch.float32, 64, features)
    assert name == "naive"
    assert "window with varlen in float32 is not supported by sdpa" in reason
    assert resolve_attention("tiled", "cpu", torch.float32, 64, features)[0] == "tiled"
    tokens, _, cu_seqlens = packed_batch()
    with pytest.raises(ValueError, match="varlen in float32 is not supported by sdpa"):
        gpt("sdpa")(tokens, cu_seqlens=cu_seqlens)


def test_documents_are_checked_before_they_go_to_the_gpu():
    right = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert place_documents(right, 5, DEVICE).tolist() == [0, 3, 8]
    assert place_documents(right, 5, torch.device("meta")).device.type == "meta"  # also where it is no GPU of CUDA's
    with pytest.raises(ValueError, match="max_seqlen is 4 but document 1 has 5 tokens"):
        place_documents(right, 4, DEVICE)
    with pytest.raises(ValueError, match="cu_seqlens falls at document 1"):
        place_documents(torch.tensor([0, 5, 4, 8], dtype=torch.int32), 8, DEVICE)
    for wrong in (right[:0], right[:1], right[None], right.long()):
        with pytest.raises(ValueError, match=r"cu_seqlens has dtype .*; expected int32 and \(documents"):
            place_documents(wrong, 8, DEVICE)
    with pytest.raises(ValueError, match="cu_seqlens has type list; expected"):
        place_documents([0, 8], 8, DEVICE)


# ---- model.mask

MASKS = ({"mask": "prefix:3", "window": 4}, {"mask": "bigbird:2", "window": 3}, {"mask": "dilated:3", "window": 5})


@pytest.mark.parametrize(
    ("mask", "window", "seen"),
    [
        ("prefix:3", 4, {1: [0, 1, 2], 20: [0, 1, 2, 17, 18, 19, 20]}),
        ("prefix:3", None, {1: [0, 1, 2], 5: [0, 1, 2, 3, 4, 5]}),
        ("bigbird:2", 3, {1: [0, 1], 20: [0, 1, 18, 19, 20]}),
        ("dilated:3", 5, {1: [1], 20: [8, 11, 14, 17, 20]}),
        (f"dilated:{2**30}", None, {20: [20]}),
    ],
)
def test_a_mask_shows_the_tokens_that_its_name_says(mask, window, seen):
    pattern = Pattern(mask, window, SEQ_LEN, "cpu")
    shown = pattern(SEQ_LEN).dense()[0, 0]
    assert {query: shown[query].nonzero().flatten().tolist() for query in seen} == seen
    shorter = Pattern(mask, window, 2, "cpu")(2)  # whose bits show no key behind its last
    assert all(map(torch.equal, pattern(2)[:3], shorter[:3]))


def test_bigbird_shows_one_far_block_in_twenty():
    blocks = torch.arange(400)
    shown = mask_mod("bigbird:1", 1)(0, 0, 64 * blocks[200:, None], 64 * blocks[None, 1:200])
    assert 0.045 < shown.float().mean() < 0.055


@pytest.mark.parametrize("kind", MASKS, ids=lambda kind: kind["mask"])
def test_every_attention_understands_a_mask(kind):
    tokens = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    results = {}
    for attention in ("naive", "tiled", "sdpa", "flash"):
        model = gpt(attention, **kind)
        loss = model(tokens, tokens.roll(-1, 1))
        results[attention] = [model(tokens), *torch.autograd.grad(loss, list(model.parameters()))]
    shorter = model(tokens[:, :-3])
    torch.testing.assert_close(shorter, results["flash"][0][:, :-3], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results["naive"][0], gpt("naive")(tokens), atol=1e-2)
    for attention in ("tiled", "sdpa", "flash"):
        for a, b in zip(results[attention], results["naive"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_a_prefix_predicts_nothing_that_it_sees(loss):
    """A token of the prefix sees the next one: only the last of them, and those behind it, are in the loss."""
    model = gpt("naive", mask="prefix:6", loss=loss)
    tokens = torch.randint(1, VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    targets = tokens.roll(-1, 1)
    expected = torch.nn.functional.cross_entropy(model(tokens)[:, 5:].flatten(0, 1), targets[:, 5:].flatten())
    torch.testing.assert_close(model(tokens, targets) / targets.numel(), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_compiles_into_one_graph():
    model = gpt("flash", mask="prefix:6")
    tokens = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(6)).to(DEVICE)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask": "prefix"}, r"model.mask=prefix is unknown; use null or one of prefix:N \(the first N tokens"),
        ({"mask": "strided:4"}, "model.mask=strided:4 is unknown"),
        ({"mask": "prefix:0"}, r"model.mask=prefix:0: prefix's number is from 1 to 2\^30; use prefix:1"),
        ({"mask": "bigbird:4"}, "model.mask=bigbird:4 hides nothing without a window; set model.window"),
    ],
)
def test_masks_that_are_none(keys, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**keys)


def test_a_masked_run_is_not_sampled(tmp_path, monkeypatch, capsys):
    """Its prompt was printed, and then that model.mask=null is the remedy, which is no key of sampling."""
    train(small_run(tmp_path, "train.steps=1", "model.mask=dilated:2", "model.attention=naive"), tmp_path / "run")
    said = told(
        "scripts.sample", [f"checkpoint={tmp_path / 'run'}", "hardware.device=cpu", "prompt=a"], monkeypatch, capsys
    )
    assert (said.code, said.out) == (2, "")
    assert "trained with model.mask=dilated:2, of which nothing can be kept" in said.error
    assert "train again with model.mask=null" in said.error


def test_what_a_masked_model_cannot_do_is_refused_in_a_line():
    with pytest.raises(
        ValueError, match=r"model.mask=dilated:2 keeps no documents apart; use data.document_mask=false"
    ):
        resolve_model(GPTConfig(mask="dilated:2"), "cpu", torch.float32, document_mask=True)
    with pytest.raises(
        ValueError, match=r"model.mask=dilated:2 has no KV cache: it cannot generate text; train with model.mask=null"
    ):
        gpt("naive", mask="dilated:2").make_cache(1)
    with pytest.raises(ValueError, match=f"model.mask=prefix:{SEQ_LEN + 1} leaves nothing to predict .* as prefix:"):
        gpt("naive", mask=f"prefix:{SEQ_LEN + 1}")
    with pytest.raises(ValueError, match=f"model.mask=dilated:{SEQ_LEN} lets each .* as dilated:{SEQ_LEN // 2}, or"):
        gpt("naive", mask=f"dilated:{SEQ_LEN}")
    tokens = torch.zeros(1, 5, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"model.mask=prefix:6 predicts nothing of 5 tokens; give more"):
        gpt("naive", mask="prefix:6")(tokens, tokens)
    with pytest.raises(ValueError, match=r"model.mask=dilated:2 cannot generate text; use train.sample_tokens=0"):
        resolve(settings("model.mask=dilated:2", "train.sample_tokens=5"))
    with pytest.raises(ValueError, match=r"model.mask=prefix:3000 leaves nothing to predict"):  # before a text is read
        resolve(settings("model.mask=prefix:3000", "data=text", "data.files=missing.txt"))


@pytest.mark.parametrize("kind", MASKS, ids=lambda kind: kind["mask"])
def test_the_probe_of_who_sees_whom_knows_the_masks(kind):
    hardware = Hardware(torch.device(DEVICE), torch.float32, False, "")
    config = GPTConfig(num_layers=2, num_heads=2, n_embd=32, attention="naive", **kind)
    assert probe(config, hardware) == {"model": None}


def test_a_masked_model_can_be_pickled():
    """As any other: spawned workers get it so."""
    model = GPT(
        GPTConfig(num_layers=1, num_heads=1, n_embd=16, attention="naive", loss="plain", mask="prefix:4"), 10, 8
    )
    tokens = torch.arange(6)[None]
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))
