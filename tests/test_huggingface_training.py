"""A model of transformers in our loop: loaded, trained, resumed, sampled from, and handed on as a folder of theirs."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")

from conf.keys import known_keys  # noqa: E402
from conf.program import settings_from  # noqa: E402
from conf.resumed import with_earlier_settings  # noqa: E402
from conf.schema import Settings  # noqa: E402
from data import build_tokenizer, open_dataset  # noqa: E402
from data.tokenizer_json import tokenizer_json  # noqa: E402
from model import GPTConfig, build_model, generate, huggingface_model, resolve_model  # noqa: E402
from scripts import doctor, explain, export_hf, parity  # noqa: E402
from scripts.bench import generation  # noqa: E402
from scripts.bench import training as bench_training  # noqa: E402
from tests.huggingface_models import GROUPED, LAYERS, SIZES, VOCAB, build, pytorch_on_a_cpu  # noqa: E402
from tests.runs import CORPUS, contents, settings, settings_of  # noqa: E402
from train import train  # noqa: E402
from training import memory, stepper  # noqa: E402
from training.checkpoint import open_checkpoint  # noqa: E402
from training.hardware import HardwareConfig, set_up  # noqa: E402
from training.optimizer import OptimConfig, Optimizer  # noqa: E402
from training.speed import model_flops  # noqa: E402
from training.trained import load_trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "threads_as_before")
TEXT = "the quick brown fox: naïve café 漢字"


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch):
    pytorch_on_a_cpu(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: saved(family, tmp_path_factory.mktemp(family) / "theirs") for family in ("GPT2", "Llama")}


@pytest.fixture(params=["GPT2", "Llama"])
def folder(request, folders):
    return folders[request.param]


def saved(family, path, **changed):
    """A tiny random model as transformers saves it, with a tokenizer of its own: bytes."""
    model = build(family, vocab_size=260, initializer_range=0.05, eos_token_id=256, **changed)
    model.save_pretrained(path)
    export = tokenizer_json(build_tokenizer("bytes"))
    (path / "tokenizer.json").write_text(json.dumps(export))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def run_settings(folder, tmp_path, *overrides):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(CORPUS)
    return settings(
        "model=huggingface", f"model.name={folder}", "data=text", f"data.files={corpus}",
        f"data.cache_dir={tmp_path}/c",
        "data.seq_len=32", "train.batch_tokens=128", "train.steps=4", "train.micro_batch=2", "train.eval_windows=2",
        "train.sample_tokens=8", "optim.warmup_steps=1", "logger.wandb=disabled", "hardware.device=cpu", *overrides,
        experiment=None,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "how"), [("GPT2", "tiled documents"), ("Llama", "sdpa")])
def test_trained_resumed_and_handed_on(folders, family, how, tmp_path):
    folder = folders[family]
    more = {"tiled documents": ["model.attention=tiled", "data.document_mask=true", "model.loss=chunked"],
            "sdpa": ["model.attention=sdpa"]}[how]  # fmt: skip
    more = [*more, "optim.schedule=constant"]
    assert train(run_settings(folder, tmp_path, *more), tmp_path / "whole")["exit_code"] == 0
    train(run_settings(folder, tmp_path, *more, "train.steps=2"), tmp_path / "half")
    resumed = run_settings(folder, tmp_path, *more, f"resume={tmp_path}/half")
    dataset = open_dataset(resumed.data, resumed.tokenizer)
    config, *_ = resolve_model(resumed.model, "cpu", torch.float32, document_mask=resumed.data.document_mask)
    assert "after 2 steps" in doctor.check_resume(resumed, model=config, dataset=dataset).text
    train(resumed, tmp_path / "half")
    assert contents(open_checkpoint(tmp_path / "half")) == contents(open_checkpoint(tmp_path / "whole"))
    # handed on
    out = tmp_path / "out"
    export_hf.main.__wrapped__(export_hf.ExportSettings(str(tmp_path / "whole"), str(out)), tmp_path)
    card = (out / "README.md").read_text()
    assert f"from the weights of {folder.name} |" in card
    assert "instructions" not in card, "it may have been taught"
    assert f"What {folder.name} has holds on." in card
    assert f"\nmodel:\n  name: {folder.name}\n  dropout: 0.0\n  attention_dropout: 0.0\noptim:" in card, (
        "mlp is not theirs"
    )
    assert str(folder.parent) not in card
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT)["input_ids"] == build_tokenizer("bytes").encode_ordinary(TEXT)
    model = build_model(resolved(folder, "naive"), 257, 32, device="cpu")
    open_checkpoint(tmp_path / "whole").load_weights(model)
    ids = torch.randint(257, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model.eval()(ids), atol=1e-4, rtol=0)
        text = theirs.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), max_new_tokens=12, do_sample=False)
    ours = [row[0][1] for row in generate(model, ids[:1].tolist(), max_new_tokens=12, temperature=0.0)]
    assert text[0, 20:].tolist() == ours[: text.size(1) - 20]
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert (before - theirs(ids).logits).abs().max() > 1e-3


def test_a_folder_that_was_moved_or_changed(tmp_path, capsys):
    """A checkpoint says what the model is: its folder is for the first start."""
    folder = saved("Llama", tmp_path / "theirs")
    begun = run_settings(folder, tmp_path, "optim=adamw", "train.steps=2", "train.sample_tokens=0")
    train(begun, tmp_path / "run")
    checkpoint, ids = open_checkpoint(tmp_path / "run"), torch.randint(257, (2, 20))
    with torch.no_grad():
        logits = load_trained(checkpoint, "cpu", torch.float32, attention="naive")[0].eval()(ids)
        moved = folder.rename(tmp_path / "moved")
        model, tokenizer = load_trained(checkpoint, "cpu", torch.float32, attention="naive")
        assert torch.equal(model.eval()(ids), logits)
    export_hf.write_folder(tmp_path / "out", model, tokenizer, "")
    assert "tokenizer  without its chats and its beginning of a text: " in capsys.readouterr().out
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(theirs, logits, atol=1e-4, rtol=0)
    # it goes on from where it is now
    more = f"resume={tmp_path}/run", f"tokenizer={moved}", "optim=adamw", "train.steps=3", "train.sample_tokens=0"
    resumed = run_settings(moved, tmp_path, *more)
    assert train(resumed, tmp_path / "run")["steps"] == 3
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    huggingface_model.described.cache_clear()
    said = r"was trained with rms_norm_eps=1e-06 of .*moved, whose config.json says 0.1 now; put it back"
    with pytest.raises(ValueError, match=said):
        train(resumed, tmp_path / "run")
    with torch.no_grad():
        found = load_trained(checkpoint, "cpu", torch.float32, attention="naive")[0].eval()(ids)
    assert torch.equal(found, logits)


def test_a_run_that_begins_with_their_weights_has_adamw(folders, tmp_path, monkeypatch):
    """The quickstart, which the command line asks for where it names no experiment, has Muon."""
    train(run_settings(folders["GPT2"], tmp_path, "model.attention=sdpa", "train.steps=1"), tmp_path / "theirs")
    begun = f"init_from={tmp_path}/theirs"

    def found(*typed):
        with initialize_config_module("conf", version_base="1.3"):
            cfg = compose("config", overrides=["experiment=quickstart", begun, *typed], return_hydra_config=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)  # as @hydra.main does
        cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
        cfg = with_earlier_settings(cfg, [begun, *typed], tmp_path / "tuned", set(known_keys(Settings)))
        return settings_from(cfg, Settings)

    asked = found("train.steps=7")
    assert (asked.optim, asked.train.steps) == (OptimConfig(name="adamw", lr=6e-4), 7)
    assert asked.model.name == asked.tokenizer == str(folders["GPT2"])
    assert found("optim.lr=1e-5").optim == OptimConfig(name="adamw", lr=1e-5)
    with pytest.raises(ValueError, match="optim=muon is for a GPT of ours"):
        found("optim=muon")


def poison(step):
    if step.number == 2:
        for p in step.optimizer.parameters:
            p.data.fill_(1e38)


def test_a_step_that_is_not_finite_is_named_and_kept(folder, tmp_path, capsys):
    """And no command is named that would refuse what was kept."""
    summary = train(run_settings(folder, tmp_path), tmp_path / "run", on_step=poison)
    said = capsys.readouterr().out
    assert summary["exit_code"] == 65
    assert "bad step   3: its " in said
    assert "is not finite; first in " in said
    assert f"saved      {tmp_path}/run/bad_steps/step_000003\n" in said


def test_a_step_that_is_not_finite_is_named_where_layers_return_tuples(tmp_path, capsys):
    config = transformers.GPTJConfig(vocab_size=260, n_positions=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    folder = saved_of(saved("Llama", tmp_path / "theirs"), config)  # with that one's tokenizer
    given = run_settings(folder, tmp_path, "model.attention=naive", "train.sample_tokens=0")
    assert train(given, tmp_path / "run", on_step=poison)["exit_code"] == 65
    assert "bad step   3: its loss is not finite; first in " in capsys.readouterr().out


def test_memory_that_does_not_suffice_ends_in_one_line(folder, tmp_path, monkeypatch):
    """Before the first step or in it; what a change would save nobody knows, so none has a forecast."""

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    ways = "use a smaller model, train.micro_batch or data.seq_len, model.activation_checkpointing=full or more memory$"
    monkeypatch.setattr(stepper, "training_step", full)
    with pytest.raises(ValueError, match=f"cpu is out of memory, with train.micro_batch=2, .*; {ways}"):
        train(run_settings(folder, tmp_path), tmp_path / "run")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(memory.DoesNotFit, match=f"0.00 GiB are free on cpu.*; {ways}"):
        train(run_settings(folder, tmp_path), tmp_path / "other")


def test_a_tokenizer_is_handed_on_with_its_own_configuration(tmp_path):
    folder = saved("Llama", tmp_path / "theirs")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "a"}
    config |= {"pad_token": "b", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    model = build_model(resolved(folder, "naive"), 257, 32, device="cpu")
    export_hf.write_folder(tmp_path / "out", model, build_tokenizer(str(folder)), "")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.bos_token, found.pad_token, found.model_max_length) == ("a", "b", 64)
    assert found.apply_chat_template([{"role": "user", "content": "c"}], tokenize=False) == "ac"


@pytest.mark.gpu
def test_gpu_trained_and_sampled_from(folder, tmp_path, capsys):
    """With the defaults of a GPU: in 16 bits, our attention, and a text that is drawn at the end."""
    assert train(run_settings(folder, tmp_path, "hardware.device=cuda"), tmp_path / "run")["exit_code"] == 0
    assert "--- a sample after 4 steps" in capsys.readouterr().out


def resolved(folder, attention, document_mask=False, **changed):
    config = GPTConfig(name=str(folder), attention=attention, loss="plain", **changed)
    return resolve_model(config, "cpu", torch.float32, document_mask=document_mask)[0]


def test_packed_documents_off_a_cpu_and_without_flash_are_refused_with_what_helps(folder):
    """Two refusals named each other's remedy."""
    config = GPTConfig(name=str(folder), loss="plain")
    with pytest.raises(ValueError, match=r"documents apart in some models only; use data.document_mask=false$"):
        resolve_model(config, "mps", torch.float32, document_mask=True)


def test_a_text_goes_on_under_autocast(folder):
    """As samples of a run in 16 bits do: RoPE's float32 keys lie in the cache beside values of 16 bits."""
    model = build_model(resolved(folder, "tiled"), 257, 32, device="cpu").eval()
    ids, cache = torch.randint(257, (1, 20)), transformers.DynamicCache(config=model.inner.config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.inner(input_ids=ids[:, :19], past_key_values=cache, use_cache=True)
        last = model.inner(input_ids=ids[:, 19:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(last, model(ids)[:, 19:], atol=0.02, rtol=0)


def test_a_text_changes_no_mode_of_a_model_between_its_tokens(folder):
    """Two texts in turns, one of them left half way; a part that is not trained stays as it is."""
    config = resolved(folder, "tiled", attention_dropout=0.5)
    model = build_model(config, 257, 32, device="cpu").train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    alone = [list(generate(model, [[1, 2]], max_new_tokens=n, temperature=0.0)) for n in (3, 6)]
    short, long = (generate(model, [[1, 2]], max_new_tokens=n, temperature=0.0) for n in (3, 6))
    first = [next(short), next(long)]
    assert [module.training for module in model.modules()] == modes
    assert [first[:1] + list(short), first[1:] + list(long)] == alone
    next(generate(model, [[1, 2]], max_new_tokens=6))
    assert [module.training for module in model.modules()] == modes


def test_a_text_is_in_the_dtype_of_its_call(folder):
    model, seen = build_model(resolved(folder, "sdpa"), 257, 32, device="cpu"), []
    model.inner.get_output_embeddings().register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        inside = generate(model, [[1, 2]], max_new_tokens=2)
    list(inside)
    outside = generate(model, [[1, 2]], max_new_tokens=2)
    with torch.autocast("cpu", torch.bfloat16):
        list(outside)
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("attention", ["sdpa", "tiled"])
def test_a_forward_in_inference_mode_keeps_none_from_being_trained(attention, folder):
    model, tokens = build_model(resolved(folder, attention), 257, 32, device="cpu"), torch.randint(257, (2, 16))
    with torch.inference_mode():
        model(tokens)
    model(tokens, tokens).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_generation(folder):
    """Texts do not depend on each other, end at the stop token, and go on past the model's longest context."""
    model = build_model(resolved(folder, "tiled"), 257, 32, device="cpu")

    def drawn(prompts, **options):
        texts = {}
        for step in generate(model, prompts, seed=3, **options):
            for number, token in step:
                texts.setdefault(number, []).append(token)
        return texts

    prompts = [[1, 2, 3], list(range(40, 60))]
    together = drawn(prompts, max_new_tokens=70, num_samples=2)  # the longest context is 64
    assert [len(text) for text in together.values()] == [70] * 4
    assert together[0] != together[1]
    alone = drawn(prompts[1:], max_new_tokens=70, num_samples=2)
    assert [alone[0], alone[1]] == [together[2], together[3]]
    stop = together[0][5]
    assert (
        drawn(prompts[:1], max_new_tokens=70, num_samples=2, stop_token=stop)[0]
        == together[0][: together[0].index(stop) + 1]
    )
    assert model.training
    with pytest.raises(ValueError, match=r"cache_dtype=torch.int8 is for a GPT of ours; .* has its own cache"):
        drawn(prompts, max_new_tokens=1, cache_dtype=torch.int8)


@pytest.mark.parametrize(("config", "more"), [
    ("OpenAIGPTConfig", {"n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.5}),  # which has no cache
    ("RecurrentGemmaConfig", {"lru_width": 64, "block_types": ["recurrent", "attention"], "attention_window_size": 8}),
    ("MiniMaxConfig", {"num_local_experts": 2, "block_size": 8}),  # which takes its own alone
])  # fmt: skip
def test_a_text_is_what_a_model_with_another_cache_or_none_writes(config, more, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB} if config == "OpenAIGPTConfig" else GROUPED
    config = getattr(transformers, config)(**sizes | more)
    model = build_model(resolved(saved_of(tmp_path, config), "naive"), VOCAB, 32, device="cpu")
    head = model.inner.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))  # a tied one says a token again and again
    prompts, texts = [[5, 6, 7, 8, 9], list(range(20, 32))], {}
    for step in generate(model, prompts, max_new_tokens=12, temperature=0.0):
        for number, token in step:
            texts.setdefault(number, []).append(token)
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + texts[number]]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == texts[number]


def test_loss_and_documents(folder):
    """Chunked, plain, packed and each document alone: one loss."""
    model = build_model(resolved(folder, "tiled"), 257, 32, device="cpu").eval()
    tokens = torch.randint(257, (2, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    starts = torch.tensor([0, 10, 32, 64], dtype=torch.int32)
    with torch.no_grad():
        plain = model(inputs, targets, cu_seqlens=starts)
        alone = sum(
            model(inputs[r, a:b][None], targets[r, a:b][None]) for r, a, b in ((0, 0, 10), (0, 10, 32), (1, 0, 32))
        )
        model.config.loss = "chunked"
        torch.testing.assert_close(model(inputs, targets, cu_seqlens=starts), plain)
    torch.testing.assert_close(alone, plain)


def saved_of(path, config):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def test_layers_that_mix_documents_are_refused(tmp_path):
    """A convolution over the tokens takes no notice of cu_seqlens: the loss was another, in silence."""
    config = transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"])
    model = build_model(resolved(saved_of(tmp_path, config), "tiled", document_mask=True), VOCAB, 32, device="cpu")
    tokens = torch.arange(32)[None]
    assert model(tokens, tokens) > 0
    with pytest.raises(ValueError, match=r"has layers in which packed documents see .*; use data.document_mask=false"):
        model(tokens, tokens, cu_seqlens=torch.tensor([0, 10, 32], dtype=torch.int32))


@pytest.mark.parametrize("refusal", [TypeError("unexpected keyword argument 'cu_seq_lens_q'"), ValueError("of pairs")])
def test_a_model_that_takes_no_documents_keeps_none_apart(refusal, folder, monkeypatch):
    def forward(*_: Any, **__: Any) -> Any:
        raise refusal

    model = build_model(resolved(folder, "tiled"), 257, 32, device="cpu")
    assert model.keeps_documents_apart
    monkeypatch.setattr(model.inner, "forward", forward)
    assert not model._keeps_documents_apart()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "=false"),
        (lambda: transformers.FalconConfig(**SIZES), "use model.attention=sdpa and data.document_mask=false"),
    ],
    ids=["Lfm2", "Falcon"],
)
def test_documents_that_cannot_be_kept_apart_are_refused_before_the_run(tmp_path, config, match):
    """It was at the first step of a run that had begun; and of Falcon's two remedies each was refused for the other."""
    folder = saved_of(tmp_path / "theirs", config())
    how = {"device": "cpu", "document_mask": True}
    with pytest.raises(ValueError, match=match):
        build_model(resolved(folder, "tiled", document_mask=True), VOCAB, 32, **how)


OF_OURS = {
    "mlp": "relu2", "mlp_hidden": 99, "qk_norm": True, "tie_embeddings": False, "window": 7,
    "mask": "prefix:3", "rope_base": 5e5, "num_heads": 8, "num_kv_heads": 1, "n_embd": 96,
}  # fmt: skip


@pytest.mark.parametrize(("changed", "match"), [
    *(({key: value}, rf"model.{key}={value} describes a GPT of ours") for key, value in OF_OURS.items()),
    ({"num_layers": 7}, r"model.num_layers=7 describes a GPT of ours and .* has its own; leave it out"),
    ({"activation_checkpointing": "pointwise"}, r"model.activation_checkpointing=pointwise is for a GPT of ours"),
])  # fmt: skip
def test_what_describes_a_gpt_of_ours_is_refused(folder, changed, match):
    with pytest.raises(ValueError, match=match):
        resolved(folder, "sdpa", **changed)


def test_a_dropout_that_their_configuration_has_not_is_refused(folders):
    llama = folders["Llama"]
    build_model(resolved(llama, "tiled", attention_dropout=0.3), 257, 32, device="cpu")
    with pytest.raises(ValueError, match=r"theirs has no such dropout as model.dropout=0.3; use model.dropout=0"):
        build_model(resolved(llama, "sdpa", dropout=0.3), 257, 32, device="cpu")


def test_refusals(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model.name=.*nowhere is no folder; give one that save_pretrained wrote"):
        resolved(tmp_path / "nowhere", "sdpa")
    with pytest.raises(ValueError, match=r"model.attention=naive with model.name .* keeps documents apart in some"):
        resolved(folder, "naive", document_mask=True)
    assert resolved(folder, "auto", document_mask=True).attention == "tiled"
    with pytest.raises(ValueError, match=r"model.attention=tiled with model.name is for a CPU; use .*=flash"):
        build_model(resolved(folder, "tiled"), 257, 32, device="cuda")
    with pytest.raises(ValueError, match=r"optim=muon is for a GPT of ours; with model.name use optim=adamw"):
        run_settings(folder, tmp_path, "optim=muon")
    with pytest.raises(ValueError, match=r"data.seq_len=100 is longer than the 64 tokens of"):
        build_model(resolved(folder, "sdpa"), 257, 100, device="cpu")
    longest = build_model(resolved(folder, "sdpa"), 260, 64, device="cpu")
    assert longest(torch.zeros(1, 64, dtype=torch.int64)).shape == (1, 64, 260)
    with pytest.raises(ValueError, match=r"the tokenizer has 300 tokens, .* 260; use tokenizer="):
        build_model(resolved(folder, "sdpa"), 300, 32, device="cpu")


def test_a_head_is_as_wide_as_their_configuration_says(tmp_path):
    """Not n_embd / num_heads: that is 288 for Gemma 2 2B, whose heads of 256 flash takes, and 45 for gpt-oss-20b."""
    wide = saved("Gemma2", tmp_path / "wide", hidden_size=576, num_attention_heads=2, head_dim=256)
    config = GPTConfig(name=str(wide))
    assert resolve_model(config, "cuda", torch.bfloat16)[0].attention == "flash"
    narrow = saved("Qwen3", tmp_path / "narrow", hidden_size=62)
    model = build_model(resolved(narrow, "tiled"), 257, 32, device="cpu")
    assert (model.config.n_embd, model.config.num_heads, model.config.head_dim) == (62, 4, 16)
    dense = 6 * model.num_matmul_parameters()
    assert model_flops(model)["full"] - dense == 12 * 2 * 4 * 16 * 32  # layers, heads, head_dim, keys


DBRX = {
    "vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "pad_token_id": 0,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "Dbrx"])
def test_of_experts_those_count_that_a_token_meets(name, tmp_path):
    """MFU is of them alone: all eight of Mixtral's would be counted for two that work."""
    sizes = GROUPED | {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
    if name == "DeepseekV3":  # one dense layer, one with experts of which one is every token's
        sizes |= {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 8,
            "num_key_value_heads": 4,
        }
        sizes |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
        del sizes["head_dim"]
    config = getattr(transformers, f"{name}Config")(**(DBRX if name == "Dbrx" else sizes))
    model = build_model(resolved(saved_of(tmp_path, config), "naive"), VOCAB, 32, device="cpu")
    model.inner.set_experts_implementation("eager")  # grouped products are counted by nobody
    model.requires_grad_(False)  # or the counter asks each expert's slice for its gradient's function
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.inner(torch.arange(32)[None], use_cache=False)
    of_attention = ("aten.bmm", "aten.baddbmm")
    products = sum(n for name, n in counter.get_flop_counts()["Global"].items() if str(name) not in of_attention)
    vectors = sum(x.numel() for x in model.parameters() if x.dim() == 1)
    assert products == 2 * 32 * (model.num_matmul_parameters() - vectors)


def test_what_a_model_looks_up_only_is_no_product(folders):
    """GPT-2's table of tokens is its head, too; Llama's is not."""
    for family, tables in (("GPT2", ["wpe"]), ("Llama", ["embed_tokens"])):
        model = build_model(resolved(folders[family], "naive"), 257, 32, device="cpu")
        looked_up = sum(x.numel() for name, x in model.named_parameters() if name.split(".")[-2] in tables)
        assert looked_up > 0
        assert model.num_matmul_parameters() == model.num_parameters() - looked_up
        assert huggingface_model.num_parameters(model.config) == model.num_parameters()


def test_a_model_of_texts_and_images_is_trained_on_texts(tmp_path):
    """Its configuration is inside another's."""
    text = GROUPED | LAYERS | {"query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(text_config=text, vision_config={"num_hidden_layers": 1, "hidden_size": 32})
    config.save_pretrained(tmp_path)
    found = resolved(tmp_path, "sdpa")
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.n_embd) == (2, 4, 2, 64)


def test_what_is_no_causal_model_is_refused_in_a_line(tmp_path):
    transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.name=.* cannot be loaded \(Unrecognized configuration class") as error:
        build_model(resolved(tmp_path, "sdpa"), 257, 32, device="cpu")
    assert "\n" not in str(error.value)


def test_a_model_without_attention_is_refused(tmp_path):
    config = transformers.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    match = r"model.name=.*: its config.json has num_attention_heads=None, which must be a whole number; use"
    with pytest.raises(ValueError, match=match):
        resolved(tmp_path, "naive")
    with pytest.raises(ValueError, match=match):  # scripts.doctor asks before all sizes are known
        _ = GPTConfig(name=str(tmp_path)).head_dim


def test_without_a_network_nobody_asks_the_hub_again_and_again(folder, tmp_path, monkeypatch, caplog):
    """transformers would retry for 23 s before it looks into the cache, or refuses."""

    def out_of_reach(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(f"no network, and {name} is not cached")

    monkeypatch.setattr(huggingface_model, "snapshot_download", out_of_reach)
    with pytest.raises(ValueError, match=r"model.name=some/model is no model of transformers \(no network, .*; give a"):
        resolved("some/model", "sdpa")
    with pytest.raises(ValueError, match=r"model.name=misspelt is no model of transformers \("):  # not its tokenizer
        train(run_settings("misspelt", tmp_path), tmp_path / "run")
    assert not caplog.records
    # of a model's files only the one that says whether it can be trained
    asked = []
    monkeypatch.setattr(huggingface_model, "snapshot_download", lambda *name, **how: asked.append(how) or str(folder))
    resolved("some/model", "sdpa")
    assert asked[0] == {"allow_patterns": "config.json"}

    # what is cached is taken as it is
    def only_here(name: str, *, local_files_only: bool = False, **given: Any) -> Any:
        assert local_files_only, "the hub was asked"
        return load(folder, **given)

    load = huggingface_model.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(huggingface_model, "snapshot_download", lambda *_, **__: str(folder))
    monkeypatch.setattr(huggingface_model.AutoModelForCausalLM, "from_pretrained", only_here)
    assert build_model(resolved("some/model", "sdpa"), 257, 32, device="cpu").vocab_size == 257

    # what is not, is fetched
    def only_there(name: str, *, local_files_only: bool = False, **given: Any) -> Any:
        if local_files_only:
            raise OSError(f"{name} is not cached")
        return load(folder, **given)

    monkeypatch.setattr(huggingface_model.AutoModelForCausalLM, "from_pretrained", only_there)
    assert build_model(resolved("some/model", "sdpa"), 257, 32, device="cpu").vocab_size == 257


def test_a_loss_in_chunks_of_other_logits_is_refused(tmp_path):
    """Gemma 2 caps its logits softly, which a loss over its head's product alone would leave out."""
    config = replace(resolved(saved("Gemma2", tmp_path / "gemma"), "tiled"), loss="chunked")
    with pytest.raises(ValueError, match=r"logits of .*gemma are not its head's product alone; use model.loss=plain"):
        build_model(config, 257, 32, device="cpu")


def test_a_loss_in_chunks_is_refused_where_nothing_hands_out_hidden_states(tmp_path):
    """Llama 4 is its own base model, which returns logits."""
    own = {"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "intermediate_size_mlp": 96}
    folder = saved_of(tmp_path, transformers.Llama4TextConfig(**GROUPED, **own))
    with pytest.raises(ValueError, match=r"are not its head's product alone; use model.loss=plain"):
        build_model(replace(resolved(folder, "tiled"), loss="chunked"), VOCAB, 32, device="cpu")


def configured(file, **values) -> None:
    path = file.with_name("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(("spoil", "match"), [
    (lambda file: file.unlink(), r"theirs cannot be loaded \(Error no file named model.safetensors.*\); give a causal"),
    (lambda file: file.write_bytes(file.read_bytes()[:999]), r"theirs cannot be loaded \(Error while deserializing"),
    (lambda file: build("Llama", vocab_size=260).base_model.save_pretrained(file.parent),
     r"theirs lacks 1 weights of LlamaForCausalLM, such as lm_head.weight; give one that was saved as that cl"),
    (lambda file: file.with_name("config.json").write_text('{"model_type": "llama", "num_attention_heads": "four"}'),
     r"theirs is no model of transformers \(Validation error for field 'num_attention_heads'"),
    (lambda file: configured(file, num_attention_heads=0), r"theirs has a config.json that does not fit it \(ZeroDiv"),
    (lambda file: configured(file, vocab_size=300), r"theirs has a config.json that does not fit it \(RuntimeError"),
    (lambda file: configured(file, hidden_act="none"), r"theirs has .* \(KeyError: 'none'\); correct it"),
])  # fmt: skip
def test_a_model_that_is_not_whole_is_refused_in_a_line(spoil, match, tmp_path):
    folder = saved("Llama", tmp_path / "theirs")
    spoil(folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model.name=.*{match}") as error:
        build_model(resolved(folder, "sdpa"), 257, 32, device="cpu")
    assert "\n" not in str(error.value)


def test_a_model_that_needs_a_package_says_which(folder, monkeypatch):
    def lacking(*_: Any, **__: Any) -> Any:
        raise ImportError("This model needs causal_conv1d\nInstall it")

    monkeypatch.setattr(huggingface_model.AutoModelForCausalLM, "from_pretrained", lacking)
    with pytest.raises(ValueError, match=r"^model.name=.* cannot be loaded \(This model needs causal_conv1d\); give a"):
        build_model(resolved(folder, "sdpa"), 257, 32, device="cpu")


def test_weights_of_16_bits_are_trained_in_32(folders, tmp_path):
    """Updates of a learning rate as small as a tuned model's would be rounded away."""
    folder = saved("Llama", tmp_path / "half")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = build_model(resolved(folder, "sdpa"), 257, 32, device="cpu")
    assert {x.dtype for x in model.parameters()} == {torch.float32}


def test_full_recomputation_runs_each_layer_again(folder):
    """And gives the same gradients; its layers are the model's own."""
    gradients, runs = [], []
    for mode in ("none", "full"):
        model = build_model(resolved(folder, "tiled", activation_checkpointing=mode), 257, 32, device="cpu")
        assert len(model.blocks) == 2
        found = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_, found=found: found.append(1))
        tokens = torch.arange(32)[None]
        model(tokens, tokens).backward()
        runs.append(len(found))
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    assert torch.equal(*gradients)
    assert runs == [2, 4]


def test_a_batch_of_another_shape_has_its_own_positions(folder):
    model = build_model(resolved(folder, "tiled"), 257, 32, device="cpu").eval()
    tokens = torch.randint(257, (3, 32))
    with torch.no_grad():
        whole = model(tokens)
        for part in (tokens[:1], tokens[:2], tokens[:, :7]):
            torch.testing.assert_close(model(part), whole[: len(part), : part.shape[1]], atol=1e-4, rtol=0)


def test_the_longest_context_is_read_whole_and_then_its_last_half(folder):
    model = build_model(resolved(folder, "tiled", attention_dropout=0.5), 257, 64, device="cpu")
    text = list(range(64))
    steps = generate(model, [text], max_new_tokens=3, temperature=0.0)
    texts = [text]
    for ((_, token),) in steps:
        texts.append([*texts[-1], token])
    assert model.training, "as it was"
    model.eval()
    with torch.no_grad():
        first = model(torch.tensor([texts[0]]))[0, -1, :257].argmax()
        second = model(torch.tensor([texts[1][-32:]]))[0, -1, :257].argmax()
        third = model(torch.tensor([texts[2][-33:]]))[0, -1, :257].argmax()
    assert texts[3][64:] == [int(first), int(second), int(third)]


def test_a_text_has_no_token_that_the_tokenizer_has_not(folder):
    """The model's table has rows beyond the vocabulary."""
    model = build_model(resolved(folder, "tiled"), 5, 32, device="cpu").eval()
    drawn = [token for step in generate(model, [[1, 2, 3]], max_new_tokens=40, temperature=9.0) for _, token in step]
    assert max(drawn) < 5
    assert len(set(drawn)) > 2
    assert not model.training, "as it was"


def test_an_attention_that_transformers_has_not_is_refused_by_its_key(tmp_path):
    """When a run is resolved, as scripts.doctor asks no further; only auto may choose another."""
    folder = saved("GptOss", tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"model.attention=sdpa cannot be .*none such for it; use model.attention=nai"):
        resolved(folder, "sdpa")
    config, reason, _ = resolve_model(GPTConfig(name=str(folder)), "cpu", torch.float32)
    assert (config.attention, reason) == ("naive", "auto: transformers has no sdpa for this model")
    assert build_model(config, 257, 32, device="cpu").num_parameters()
    with pytest.raises(ValueError, match=r"use model.attention=naive, or model.attention=auto: naive$"):
        doctor.attention(run_settings(folder, tmp_path, "model.attention=sdpa"), set_up(HardwareConfig(device="cpu")))
    # where nobody has asked before
    with pytest.raises(ValueError, match=r"model.attention=sdpa cannot be .*; use model.attention=naive$"):
        build_model(replace(config, attention="sdpa"), 257, 32, device="cpu")
    # Falcon keeps the one that it was loaded with
    falcon = transformers.FalconConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    folder = saved_of(tmp_path / "falcon", falcon)
    for changed in ({}, {"document_mask": True}):
        with pytest.raises(ValueError, match=r"model.attention=tiled cannot be .*; use model.attention=sdpa"):
            resolved(folder, "auto" if changed else "tiled", **changed)
    ids = torch.randint(VOCAB, (2, 20))
    plain, fused = (build_model(resolved(folder, name), VOCAB, 32, device="cpu").eval() for name in ("naive", "sdpa"))
    assert plain.inner.config._attn_implementation == "eager"  # what scripts.export_hf asks for
    torch.testing.assert_close(plain(ids), fused(ids))


def test_a_model_that_adds_numbers_to_its_mask_has_no_attention_of_ours(tmp_path):
    sizes = {key: value for key, value in GROUPED.items() if key != "head_dim"}
    folder = saved_of(tmp_path, transformers.DogeConfig(**sizes))
    for asked in ({"attention": "tiled"}, {"attention": "auto", "document_mask": True}):
        with pytest.raises(ValueError, match=r"model.attention=tiled cannot be .*; use model.attention=sdpa"):
            resolved(folder, **asked)
    assert build_model(resolved(folder, "auto"), VOCAB, 32, device="cpu").num_parameters()


def test_what_only_sampling_reads_does_not_keep_a_model_from_being_saved(tmp_path):
    """As in files of Llama 2 and Vicuna: transformers opens them, and refuses to write them."""
    folder = saved("Llama", tmp_path / "theirs")
    of_sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "typical_p": 0.8}
    of_sampling |= {"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4}
    for samples in (False, True):
        given = of_sampling | {"do_sample": samples, "eos_token_id": 256}
        (folder / "generation_config.json").write_text(json.dumps(given))
        build_model(resolved(folder, "naive"), 257, 32, device="cpu").save(tmp_path / "out")
        found = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
        assert (found.do_sample or False, found.eos_token_id) == (samples, 256)
        assert (found.temperature, found.top_k) == ((0.6, 20) if samples else (None, None))


def test_dropout_takes_the_place_of_a_whole_number_too(tmp_path):
    folder = saved("Llama", tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(resolved(folder, "naive", attention_dropout=0.25), 257, 32, device="cpu")
    assert {module.attention_dropout for module in model.modules() if hasattr(module, "attention_dropout")} == {0.25}


def test_dropout_takes_the_place_of_theirs_wherever_it_is(folders):
    """GPT-2 calls it pdrop; attention has its own."""
    theirs = huggingface_model.their_config(GPTConfig(name=str(folders["GPT2"]), dropout=0.1, attention_dropout=0.2))
    assert (theirs.resid_pdrop, theirs.embd_pdrop, theirs.attn_pdrop) == (0.1, 0.1, 0.2)


def test_dropout_takes_the_place_of_that_in_a_configuration_inside_another(tmp_path):
    """DBRX's of attention was left as it was, in silence; and its experts are matrices, which decay."""
    folder = saved_of(tmp_path, transformers.DbrxConfig(**DBRX))
    model = build_model(resolved(folder, "naive", attention_dropout=0.25), VOCAB, 32, device="cpu")
    assert {module.attention_dropout for module in model.modules() if hasattr(module, "attention_dropout")} == {0.25}
    ((decays, others),) = [part.param_groups for part in Optimizer(model, OptimConfig(name="adamw")).optimizers]
    assert {p.ndim for p in decays["params"]} == {2}
    assert {p.ndim for p in others["params"]} == {1}


def test_a_configuration_without_a_key_that_its_model_reads_is_refused(tmp_path):
    transformers.DbrxConfig(**DBRX | {"attn_config": {"kv_n_heads": 2}}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has a config.json that does not fit it \(AttributeError: .*'rope_theta'"):
        memory.held_parameters(GPTConfig(name=str(tmp_path)))


@pytest.mark.parametrize("attention", ["sdpa", "naive", "tiled"])
def test_a_model_that_is_not_causal_is_refused(attention, tmp_path):
    folder = saved("Bert", tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"theirs is not causal: tokens see those after them; give a model that gener"):
        build_model(resolved(folder, attention), 257, 32, device="cpu")
    saved("Bert", folder, is_decoder=True)
    build_model(resolved(folder, attention), 257, 32, device="cpu")


def test_a_loss_in_chunks_of_a_head_with_a_bias_is_refused(tmp_path):
    """Phi's is 0 before it is trained, and would stay so."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.PhiConfig(vocab_size=260, pad_token_id=0, **sizes)
    transformers.PhiForCausalLM(config).save_pretrained(tmp_path / "phi")
    config = replace(resolved(tmp_path / "phi", "sdpa"), loss="chunked")
    with pytest.raises(ValueError, match=r"logits of .*phi are not its head's product alone; use model.loss=plain"):
        build_model(config, 257, 32, device="cpu")


def test_a_step_of_the_benchmark_is_theirs(folders, tmp_path, monkeypatch, capsys):
    asked, real = [], bench_training.training_step
    monkeypatch.setattr(bench_training, "training_step", lambda *a, **how: asked.append(a[0]) or real(*a, **how))
    common = (
        "model=huggingface", f"model.name={folders['GPT2']}", "data.seq_len=16", "train.batch_tokens=32",
        "bench.steps=1", "bench.warmup_steps=1", "hardware.device=cpu",
    )  # fmt: skip
    chosen = settings_of(bench_training.main, *common, "bench.vocab_size=257")
    bench_training.main.__wrapped__(chosen, tmp_path)
    assert {type(network).__name__ for network in asked} == {"PretrainedLM"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]["tokens_per_second"] > 0
    with pytest.raises(ValueError, match=r"bench.vocab_size=50257 is more than the 260 of .*; use 260 or less"):
        bench_training.main.__wrapped__(settings_of(bench_training.main, *common), tmp_path)


def test_what_knows_no_other_model_says_so(folders, tmp_path):
    theirs = ("model=huggingface", f"model.name={folders['GPT2']}", "hardware.device=cpu")
    refusals = {
        parity.main: "no attention can be put in place of another; leave it out",
        generation.main: "is no GPT of ours, which is what is timed; leave it out",
        explain.main: "nothing is known before they run; .* leave what=memory out",
    }
    for main, words in refusals.items():
        more = {explain.main: ["what=memory"], generation.main: []}.get(main, [])
        overrides = theirs if main is not generation.main else theirs[1:]
        with pytest.raises(ValueError, match=rf"^model.name=.*{words}"):
            main.__wrapped__(settings_of(main, *overrides, *more), tmp_path)
    config = GPTConfig(name=str(folders["GPT2"]), attention="naive")
    found = doctor.causality(config, set_up(HardwareConfig(device="cpu")))
    assert found.status == "ok"
    assert found.text.startswith("not asked: ")
    found = doctor.network(replace(config, num_layers=2, n_embd=64, num_heads=4), 10**6, vocab_size=None)
    assert (found.text, found.fix) == ("2 layers of 64", None)  # its rotary pairs are its own
