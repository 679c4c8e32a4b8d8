"""The formulas of `scripts.explain` against numbers worked by hand in the literature."""

import json
import sys

import pytest
import torch

from data import build_tokenizer
from data.tokenizer_json import tokenizer_json
from kernels.call import Options
from kernels.device import GPUS
from kernels.tiled import visible_tiles
from scripts import explain
from scripts.explain import (
    BOARDS,
    ExplainSettings,
    Shape,
    flops,
    hbm_bytes,
    loop_order_bytes,
    memory,
    recomputation_share,
    roofline,
)
from tests.runs import settings, small_run, told
from train import train
from training.checkpoint import open_checkpoint

MIB, GIB = 2**20, 2**30
LLAMA = Shape(num_heads=32, seq_len=4096, head_dim=128, element=2)


def test_memory_of_a_7b_layer_at_4096():
    kept = memory(LLAMA)
    assert kept["standard"] == {"Q": 32 * MIB, "K": 32 * MIB, "V": 32 * MIB, "O": 32 * MIB, "S": GIB, "P": GIB}
    assert kept["flash"]["LSE"] == 32 * 4096 * 4
    # the literature's 68 GB for 32 layers
    assert 32 * sum(kept["standard"].values()) == 68 * GIB


def test_one_heads_probabilities_at_131072():
    assert Shape(num_heads=1, seq_len=131_072).matrix_bytes == pytest.approx(34.36e9, rel=1e-3)


def test_flops_and_what_recomputation_adds():
    counted = flops(Shape(num_heads=1, seq_len=1000, head_dim=64))
    assert counted == {
        "forward": 4e6 * 64, "standard backward": 8e6 * 64, "recomputing backward": 10e6 * 64,
    }  # fmt: skip
    assert [round(share, 4) for share in recomputation_share(LLAMA).values()] == [0.1667, 0.25, 0.3333]
    assert flops(Shape(causal=True))["forward"] == flops(Shape())["forward"] / 2


def test_traffic_and_the_side_of_the_roofline():
    assert hbm_bytes(LLAMA)["standard"] == 4 * 32 * MIB + 4 * GIB
    tensor, statistics = 1024 * 128 * 2, 1024 * 4  # 8 tiles of queries, and with a mask K and V half as often
    assert hbm_bytes(Shape(num_heads=1, seq_len=1024))["flash"] == (2 + 2 * 8) * tensor + statistics
    assert hbm_bytes(Shape(num_heads=1, seq_len=1024, causal=True))["flash"] == (2 + 2 * 4) * tensor + statistics
    assert BOARDS["a100"].ridge == pytest.approx(153, abs=0.5)
    assert BOARDS["h100"].ridge == pytest.approx(295, abs=0.5)
    standard, _, flash = roofline(LLAMA, BOARDS["t4"])
    assert standard["flops_per_byte"] < BOARDS["t4"].ridge < flash["flops_per_byte"]
    assert (standard["limit"], flash["limit"]) == ("memory", "arithmetic")
    assert standard["seconds"] == pytest.approx((4 * 32 * MIB + 4 * GIB) / 320e9)
    assert flash["seconds"] == pytest.approx(4 * 4096**2 * 128 * 32 / 65e12)


def test_every_board_of_the_kernels_table_can_be_named():
    assert sorted(board.name for board in BOARDS.values()) == sorted(board.name for board in GPUS)
    assert {"t4", "a100", "h100", "h200", "b200", "rtx4090"} <= BOARDS.keys()
    assert ExplainSettings(gpu="RTX4090").gpu == "rtx4090"  # as the board's name has it


def test_keys_outside_reads_the_row_state_for_each_tile_of_keys():
    orders = loop_order_bytes(Shape(num_heads=1, seq_len=256, head_dim=64, element=2), block_q=128, block_k=64)
    tensor, statistics = 256 * 64 * 2, 2 * 256 * 4
    assert orders["keys outside (FA1)"] == {
        "Q": 4 * tensor, "K, V": 2 * tensor, "O, maximum, sum": 7 * (tensor + statistics),
    }  # fmt: skip
    assert orders["queries outside (FA2)"]["K, V"] == 2 * 2 * tensor


def tile_loads(pairs):
    """How often a loop over (query tile, key tile) takes up another tile of queries, and another tile of keys."""
    counts, held = [0, 0], [None, None]
    for pair in pairs:
        for side in (0, 1):
            counts[side] += pair[side] != held[side]
            held[side] = pair[side]
    return tuple(counts)


def test_the_reference_takes_up_as_many_tiles_as_the_formula_counts():
    """Bytes of the formula over bytes of a tile, for 4 tiles of queries and 8 of keys."""
    orders = loop_order_bytes(Shape(num_heads=1, seq_len=512, head_dim=64, element=2), block_q=128, block_k=64)
    q_tile, kv_tile = 128 * 64 * 2, 2 * 64 * 64 * 2
    pairs = list(visible_tiles(512, 512, Options(causal=False, scale=1.0), 128, 64))  # in the order of FlashAttention-2
    keys_outside = sorted(pairs, key=lambda pair: (pair[1].start, pair[0].start))
    for order, name in ((keys_outside, "keys outside (FA1)"), (pairs, "queries outside (FA2)")):
        loads = tile_loads(order)
        assert loads == (orders[name]["Q"] / q_tile, orders[name]["K, V"] / kv_tile)


def test_the_program_prints_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["explain.py"])  # and not pytest's arguments
    explain.main.__wrapped__(ExplainSettings(seq_len=512, num_heads=2, head_dim=64, gpu="t4"), tmp_path)
    text = capsys.readouterr().out
    for words in ("4BHND + 2BHN^2", "32 layers: ", "16.7% of forward", "25.0% of the standard", "keys outside", "T4"):
        assert words in text
    assert json.loads(text.splitlines()[-1])["shape"]["seq_len"] == 512


def test_the_memory_of_a_step_is_explained_for_the_arguments_of_a_run(tmp_path, capsys):
    chosen = settings(
        "what=memory", "model=gpt2_124m", "tokenizer=gpt2", "data.seq_len=1024", "train.batch_tokens=65536",
        "optim=adamw", "model.loss=plain", "model.activation_checkpointing=selective", schema=ExplainSettings,
    )  # fmt: skip
    explain.main.__wrapped__(chosen, tmp_path)
    text = capsys.readouterr().out
    assert "attention flash" in text
    for words in ("optimizer state", "activations", "backward", "attention.qkv", "mlp.up", "forecast "):
        assert words in text
    report = json.loads(text.splitlines()[-1])
    assert report["peak_bytes"] == max(sum(terms.values()) for terms in report["moments"].values())
    a_token = {"attention.qkv": 2 * 3 * 768, "attention.out": 2 * 768}  # the products that selective keeps, 16 bit
    copies = {"attention.qkv": 2 * 3 * 768**2, "attention.out": 2 * 768**2}  # of their weights
    assert len(report["layers"]) == 12
    for terms in report["layers"]:
        assert {key: terms[key] for key in a_token} == {key: 65536 * a_token[key] + copies[key] for key in a_token}
    with pytest.raises(ValueError, match="what=time is not one of attention, memory"):
        ExplainSettings(what="time")


def test_a_cpu_that_is_named_is_explained_and_no_gpu_elsewhere(tmp_path, capsys):
    explain.main.__wrapped__(settings("what=memory", "hardware.device=cpu", schema=ExplainSettings), tmp_path)
    text = capsys.readouterr().out
    assert f"; CPU ({torch.backends.cpu.get_cpu_capability()}), " in text
    assert "cuBLAS" not in text


def test_products_in_8_bits_on_a_gpu_elsewhere(tmp_path, capsys, monkeypatch):
    """No GPU here can be asked for its age, and what the forward keeps for the MLP is smaller."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = {}
    for fp8 in ("none", "mlp"):
        chosen = settings("what=memory", f"model.fp8={fp8}", schema=ExplainSettings)
        explain.main.__wrapped__(chosen, tmp_path)
        kept[fp8] = json.loads(capsys.readouterr().out.splitlines()[-1])["layers"][0]["mlp"]
    assert kept["mlp"] == kept["none"] / 2


def test_the_memory_of_one_of_several_that_share_weights(tmp_path, capsys):
    """Rows and weights are dealt out: each computes half of the rows and keeps half of the rest."""
    common = "what=memory", "tokenizer=gpt2", "train.batch_tokens=8192", "optim=adamw", "parallel.data=shard"
    reports = []
    for processes in (1, 2):
        explain.main.__wrapped__(settings(*common, f"processes={processes}", schema=ExplainSettings), tmp_path)
        reports.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    alone, shared = (report["moments"]["forward"] for report in reports)
    assert "gathered weights" in shared.keys() - alone.keys()
    assert shared["optimizer state"] == pytest.approx(alone["optimizer state"] / 2, rel=1e-3)
    assert shared["activations"] < 0.6 * alone["activations"]


def test_the_vocabulary_of_a_tokenizer_in_a_folder(tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="needs transformers: uv run --group hf")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(build_tokenizer("bytes"))))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    chosen = settings("what=memory", f"tokenizer={tmp_path}", schema=ExplainSettings)
    explain.main.__wrapped__(chosen, tmp_path)
    assert " 257 token ids" in capsys.readouterr().out


def test_a_run_that_is_resumed_has_its_own_vocabulary_and_refuses_what_train_refuses(tmp_path, monkeypatch, capsys):
    """It answered for a model that no run could go on with."""
    chosen = small_run(tmp_path, "train.steps=1", "tokenizer=characters")
    train(chosen, tmp_path / "run")
    vocab_size = open_checkpoint(tmp_path / "run").meta["vocab_size"]
    here = [f"resume={tmp_path / 'run'}"]
    explained = told("scripts.explain", ["what=memory", *here], monkeypatch, capsys)
    assert f" {vocab_size} token ids" in explained.out, explained.error
    wrongs = ("model.n_embd=64", "optim=adamw", "train.batch_tokens=512", "tokenizer=bytes")
    for wrong in wrongs:
        refused = [
            told(*what, monkeypatch, capsys)
            for what in (("scripts.explain", ["what=memory", *here, wrong]), ("train", [*here, wrong]))
        ]
        assert refused[0].code == 2
        assert "was trained with" in refused[0].error
        assert refused[0].error == refused[1].error
    assert told("scripts.explain", ["what=memory", *here, "vocab_size=7"], monkeypatch, capsys).code == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu": "v100"}, "gpu=v100 is not one of t4, rtx4090"),
        ({"seq_len": 10**200}, "seq_len=1000*? must be at most 16777216"),
        ({"what": "memory", "vocab_size": 10**20}, "vocab_size=1000*? must be at most 16777216"),
    ],
)
def test_what_cannot_be_explained_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ExplainSettings(**wrong)


def test_blocks_visited_and_skipped():
    """16 blocks each way: a prefix of two sees one block more than causal, every third token back no block less."""
    prefix = explain.mask_blocks("prefix:256", None, 2048)
    assert prefix == {"blocks": 256, "visited": 137, "partial": 14, "skipped": 119, "causal": 136}
    assert explain.mask_blocks("prefix:128", 256, 2048)["visited"] == 1 + 2 + 3 + 13 * 4
    report, shown = explain.explain_attention(settings("model.mask=dilated:3", "seq_len=512", schema=ExplainSettings))
    assert report["mask"]["visited"] == report["mask"]["causal"] == 10
    assert shown[0].startswith("model.mask=dilated:3: of 16 blocks of 128 x 128 10 are visited, 10 of them partial")


@pytest.mark.parametrize(
    ("typed", "what", "message"),
    [
        (["model.num_heads=4"], "attention", "model.num_heads is for what=memory; with what=attention use num_heads"),
        (["experiment=wikitext2", "seq_len=512"], "attention", "experiment is for what=memory; with what=attention dr"),
        (["model.window=128"], "attention", "model.window is for what=memory; with what=attention drop it"),
        (["processes=8"], "attention", "processes is for what=memory; with what=attention drop it"),
        (["seq_len=8192"], "memory", "seq_len is for what=attention; with what=memory use data.seq_len"),
        (["num_layers=2"], "memory", "num_layers is for what=attention; with what=memory use model.num_layers"),
        (["gpu=h100"], "memory", "gpu is for what=attention; with what=memory drop it"),
    ],
)
def test_a_key_that_the_other_question_reads_is_refused(typed, what, message):
    with pytest.raises(ValueError, match=message):
        explain.refuse_other_keys(typed, what, None)


def test_keys_that_a_question_reads_are_not_refused():
    typed = ["seq_len=512", "model.mask=prefix:64", "model.window=128", "hydra.run.dir=.", "--multirun"]
    explain.refuse_other_keys(typed, "attention", "prefix:64")
    explain.refuse_other_keys(["what=memory", "processes=2", "model=tiny", "-m"], "memory", None)


def test_a_command_line_of_one_layer_with_keys_of_a_run_is_refused(monkeypatch, capsys):
    outcome = told("scripts.explain", ["model.num_heads=4", "data.seq_len=512"], monkeypatch, capsys)
    assert outcome.code == 2
    assert "model.num_heads is for what=memory" in outcome.error
