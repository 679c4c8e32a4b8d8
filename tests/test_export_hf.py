"""The exported folder: its files by themselves, and, where transformers is installed, as transformers opens it."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tiktoken
import torch
from safetensors import safe_open
from torch import Tensor

from data import build_tokenizer
from data.tokenizer import END_OF_TEXT
from data.tokenizer_json import LETTERS, merges_of, tokenizer_json
from model import GPT, GPTConfig, build_model, generate, resolve_model
from model import huggingface_weights as huggingface
from scripts import export_hf
from tests.runs import CORPUS, small_run, told
from tests.test_checkpoint import size_limit
from train import train
from training.checkpoint import open_checkpoint

FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"]  # fmt: skip
SWIGLU, WINDOW = {"mlp": "swiglu"}, {"window": 5}
# what decides the class, with and without a window where both have one
HOMES = {
    "LlamaForCausalLM": SWIGLU,
    "MistralForCausalLM": SWIGLU | WINDOW,
    "Qwen3ForCausalLM": SWIGLU | {"qk_norm": True},
    "Qwen3ForCausalLM window": SWIGLU | WINDOW | {"qk_norm": True, "qk_gain": 1.7},
    "ArceeForCausalLM gelu": {"mlp": "gelu"},
    "ArceeForCausalLM relu2": {"mlp": "relu2", "mlp_hidden": 48, "rope_base": 500.0},
}
TEXT = "Wörter, naïve café 漢字 😀\n\n  it's 12345 don't\t'll \x85 \u2003 x\r\n\n 'S\x1c END!!"
# GPT-2's
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
N = 24  # tokens of a test's context, several windows


def gpt(seed=0, vocab_size=100, **changed) -> GPT:
    """A GPT with weights so large that each layer changes the logits, and no two of them are nearly equal."""
    sizes = {"num_layers": 2, "num_heads": 4, "n_embd": 32, "attention": "naive", "loss": "plain"}
    config = GPTConfig(**sizes | changed)
    model = GPT(config, vocab_size, 64, generator=torch.Generator().manual_seed(seed)).eval()
    for weight in model.parameters():
        weight.data *= 8
    return model


def small_bpe(merges=100) -> tiktoken.Encoding:
    """A tokenizer that cuts text as GPT-2's does, with tokens learned from a text; bytes are not in their order."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate((*range(128, 256), *range(128)))}
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in cut(CORPUS[:400] + TEXT * 3)]
    while len(ranks) < 256 + merges:
        counts = Counter(pair for piece in pieces for pair in pairwise(piece))
        first, second = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.setdefault(first + second, len(ranks))
        for piece in pieces:
            for n in range(len(piece) - 1):
                if piece[n : n + 2] == [first, second]:
                    piece[n : n + 2] = [first + second]
    return tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def cut(text: str) -> list[str]:
    return regex.findall(PATTERN, text)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps, a Mistral whose embeddings are not tied."""
    folder = tmp_path_factory.mktemp("exported")
    changed = ["train.steps=2", "model.mlp=swiglu", "model.window=8", "model.num_kv_heads=1", "model.attention=naive"]
    made = small_run(folder, *changed, "model.tie_embeddings=false", "tokenizer=characters")
    (folder / "run").mkdir()
    train(made, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run) -> Path:
    folder = run.parent / "folder"
    export_hf.main.__wrapped__(export_hf.ExportSettings(str(run), str(folder)), Path("."))
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.offset_keys()}


# --- the folder by itself


def test_a_run_becomes_a_folder_of_six_files(run, exported, tmp_path, monkeypatch, capsys):
    done = told("scripts.export_hf", [f"checkpoint={run}", f"folder={tmp_path / 'new' / 'it'}"], monkeypatch, capsys)
    assert (done.code, done.error) == (0, "")
    said = json.loads(done.out.splitlines()[-1])
    assert said["architecture"] == "MistralForCausalLM"
    assert sorted(path.name for path in (tmp_path / "new" / "it").iterdir()) == FILES
    for name in FILES[1:]:
        assert (tmp_path / "new" / "it" / name).read_bytes() == (exported / name).read_bytes()
    found = tensors_in(exported)
    assert said["parameters"] == sum(tensor.numel() for tensor in found.values())
    config = json.loads((exported / "config.json").read_text())
    vocab_size = open_checkpoint(run).meta["vocab_size"]
    assert vocab_size % 64
    assert (config["vocab_size"], config["sliding_window"], config["num_key_value_heads"]) == (vocab_size, 8, 1)
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == config["bos_token_id"] == vocab_size - 1
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1)
    tokenizer_config = json.loads((exported / "tokenizer_config.json").read_text())
    assert tokenizer_config["clean_up_tokenization_spaces"] is False  # transformers 4 would
    assert tokenizer_config["model_input_names"] == ["input_ids", "attention_mask"]  # and give token_type_ids
    shapes = {name.replace("layers.1", "layers.0"): tuple(tensor.shape) for name, tensor in found.items()}
    layer, width = "model.layers.0.", config["intermediate_size"]
    assert shapes == {
        "model.embed_tokens.weight": (vocab_size, 32), "lm_head.weight": (vocab_size, 32), "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,), f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32), f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.weight": (16, 32), f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (width, 32), f"{layer}mlp.up_proj.weight": (width, 32),
        f"{layer}mlp.down_proj.weight": (32, width),
    }  # fmt: skip
    assert all(bool((found[name] == 1).all()) for name in found if "norm" in name)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("tied", [True, False])
def test_each_row_of_ours_has_one_place(home, tied):
    """What shares memory with ours covers it, each element once; the rest are gains of norms."""
    model = gpt(tie_embeddings=tied, num_kv_heads=2, **HOMES[home])
    found = huggingface.tensors(model)
    assert huggingface.architecture(model.config) == home.split()[0]
    for name, weight in model.named_parameters():
        rows = [x for x in found.values() if x.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()]
        rows.sort(key=Tensor.data_ptr)
        vocabulary = 100 if name in ("embedding.weight", "head.weight") else None
        assert torch.equal(torch.cat(rows), weight[:vocabulary])
        found = {name: x for name, x in found.items() if not any(x is row for row in rows)}
    for name, gains in found.items():
        assert "norm" in name
        assert set(gains.tolist()) == {torch.tensor(model.config.qk_gain if "q_norm" in name else 1.0).item()}


def test_the_card_has_the_figures_of_the_run(run, exported):
    card = (exported / "README.md").read_text()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    meta = open_checkpoint(run).meta
    for line in (
        "| data | text corpus.txt, fingerprint " + meta["data_fingerprint"][:12],
        f"| tokenizer | characters, {meta['vocab_size']} tokens |",
        "| trained on | 512 tokens, 2 steps |",
        f"| validation loss | {last['val_loss']:.4f} nats a token, after 2 steps |",
        f"| bits per byte | {last['val_bits_per_byte']:.4f} |",
        f"| commit | {meta['provenance']['commit'] or 'unknown'} |",
        "  window: 8",
        "None is stated",
    ):
        assert line in card
    assert str(run.parent) not in card  # paths of a machine are nobody's business


@pytest.mark.parametrize(("changed", "said"), [
    ({"source": "embedded", "files": None}, "| data | embedded, fingerprint "),
    ({"source": "hub", "files": None, "name": "a/b", "config": "c"}, "| data | hub a/b c, fingerprint "),
])  # fmt: skip
def test_the_card_names_other_data(changed, said, run):
    checkpoint = open_checkpoint(run)
    checkpoint.meta["settings"]["data"] |= changed
    checkpoint.meta["settings"] |= {"init_from": "runs/another", "tokenizer": str(run)}
    card = export_hf.model_card("it", checkpoint, gpt(**SWIGLU))
    assert said in card
    assert "| trained on | 512 tokens, 2 steps, from the weights of an earlier run |" in card
    assert f"| tokenizer | {run.name}, " in card
    assert str(run.parent) not in card


def test_figures_are_those_of_the_checkpoint_and_not_made_up(run, tmp_path):
    checkpoint = open_checkpoint(run)
    lines = [{"step": 1, "loss": 1.0, "tokens": 9, "val_loss": 7.0, "val_bits_per_byte": 8.0},
             {"step": 5, "loss": 1.0, "tokens": 9, "val_loss": 1.0, "val_bits_per_byte": 1.0}]  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    checkpoint.path = tmp_path / "checkpoints" / "step_000002"
    assert "not known" in export_hf.validation(checkpoint)["validation loss"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert export_hf.validation(checkpoint) == {
        "validation loss": "7.0000 nats a token, after 1 steps",
        "bits per byte": "8.0000",
    }


# --- refusals


@pytest.mark.parametrize("mlp", ["gelu", "relu2"])
@pytest.mark.parametrize(("changed", "remedy"), [
    ({"qk_norm": True}, r"model.qk_norm=True with model.mlp=\w+ .* use model.mlp=swiglu or model.qk_norm=false"),
    ({"window": 5}, r"model.window=5 with model.mlp=\w+ .* use model.mlp=swiglu or model.window=null"),
    ({"window": 5, "qk_norm": True}, r"model.qk_norm=True with"),
])  # fmt: skip
def test_a_pair_without_a_home_is_refused_by_its_key(mlp, changed, remedy):
    with pytest.raises(ValueError, match=remedy):
        huggingface.architecture(GPTConfig(mlp=mlp, **changed))


def test_a_mask_that_transformers_has_not_is_refused_by_its_key():
    """As another model its weights would see other tokens, in silence."""
    with pytest.raises(
        ValueError, match=r"model.mask=prefix:3 is no mask of transformers; train again with model.mask"
    ):
        huggingface.architecture(GPTConfig(mlp="swiglu", mask="prefix:3"))


def test_what_the_logits_do_not_show_is_told_too():
    model = gpt(mlp="swiglu", attention_dropout=0.1, dropout=0.2, rope_base=500.0)
    told = huggingface.config_json(model, end_of_text=7)
    assert told["max_position_embeddings"] == 64
    assert told["attention_dropout"] == 0.1
    assert told["bos_token_id"] == told["eos_token_id"] == 7
    assert told["pad_token_id"] is None, "its row of the table would get no gradient"
    assert told["initializer_range"] == 0.02
    assert told["rope_theta"] == told["rope_parameters"]["rope_theta"] == 500.0  # of transformers 4, and of 5
    assert told["dtype"] == "float32"
    assert huggingface.config_json(model)["bos_token_id"] is None


def test_weights_of_16_bits_stay_so():
    model = gpt(**HOMES["Qwen3ForCausalLM window"]).bfloat16()
    assert huggingface.config_json(model)["dtype"] == "bfloat16"
    assert {x.dtype for x in huggingface.tensors(model).values()} == {torch.bfloat16}


def test_nothing_is_overwritten_and_nothing_half_written_is_left(run, tmp_path, monkeypatch, capsys):
    def refused(folder):
        done = told("scripts.export_hf", [f"checkpoint={run}", f"folder={folder}"], monkeypatch, capsys)
        assert done.code == 2
        assert done.error.count("\n") == 1
        return done.error

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for name in ("full", "file"):
        assert f"folder={tmp_path / name} exists and is not an empty folder; give another" in refused(tmp_path / name)
    assert "folder= is not given; name a new folder" in refused("")
    assert "file cannot be used (File exists)" in refused(tmp_path / "file" / "below")
    with size_limit(1000):  # safetensors has words of its own for it, and names a file that is gone
        line = f"error: {tmp_path / 'new'} cannot be used (File too large); check that path, or name another\n"
        assert refused(tmp_path / "new") == line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_folder_filled_meanwhile_is_left_alone(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "it").mkdir()
    write = export_hf.write_weights

    def write_while_another_does(*arguments, **options):
        (tmp_path / "it" / "theirs").touch()
        write(*arguments, **options)

    monkeypatch.setattr(export_hf, "write_weights", write_while_another_does)
    done = told("scripts.export_hf", [f"checkpoint={run}", f"folder={tmp_path / 'it'}"], monkeypatch, capsys)
    assert done.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["theirs"]


def test_an_empty_folder_is_taken_and_one_behind_a_link(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export_hf.main.__wrapped__(export_hf.ExportSettings(str(run), str(tmp_path / "link")), Path("."))
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == FILES
    assert (tmp_path / "link").is_symlink()


# --- the tokenizer


def read_by_hand(contents: dict, piece: str) -> list[int]:
    """Ids of a piece of text by the definition of byte-pair encoding: the earliest merge of the list goes first."""
    order = {tuple(merge.split(" ")): rank for rank, merge in enumerate(contents["model"]["merges"])}
    parts = [LETTERS[byte] for byte in piece.encode()]
    while found := [pair for pair in pairwise(parts) if pair in order]:
        pair = min(found, key=order.__getitem__)
        first = list(pairwise(parts)).index(pair)
        parts[first : first + 2] = ["".join(pair)]
    return [contents["model"]["vocab"][part] for part in parts]


def test_merges_are_recovered_from_ranks():
    encoding = small_bpe()
    contents = tokenizer_json(encoding)
    assert len(contents["model"]["merges"]) == 100
    assert [(token["id"], token["content"], token["special"]) for token in contents["added_tokens"]] == [
        (encoding.eot_token, END_OF_TEXT, True)
    ]
    multiple = 0
    for piece in cut(CORPUS[:300] + TEXT + " lllllll thethethe 漢漢漢 ïïï"):
        ids = encoding.encode_ordinary(piece)
        multiple += len(ids) < len(piece.encode())
        assert read_by_hand(contents, piece) == ids
    assert multiple > 30
    # where two ways lead to a token, it is the one by which its bytes are merged
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5}
    assert merges_of(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]


def test_gpt2s_merges(gpt2):
    contents = tokenizer_json(gpt2)
    assert contents["model"]["merges"][:3] == ["Ġ t", "Ġ a", "h e"]  # as in GPT-2's merges.txt
    assert (len(contents["model"]["merges"]), len(contents["model"]["vocab"])) == (50_000, 50_257)
    for piece in (" understanding", "Straßenbahn", " 漢字"):
        assert read_by_hand(contents, piece) == gpt2.encode_ordinary(piece)


def tokenizers_of(alphabet: str) -> list[tiktoken.Encoding]:
    return [build_tokenizer("bytes"), build_tokenizer("characters", alphabet), small_bpe()]


TEXTS = [TEXT, "", " ", f"one{END_OF_TEXT}two{END_OF_TEXT}{END_OF_TEXT} three ", "ab" * 300, CORPUS]
ALPHABET = "".join(sorted(set("".join(TEXTS))))


def check_same_ids(encoding: tiktoken.Encoding, theirs, texts=TEXTS) -> None:
    for text in texts:
        ids = encoding.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == encoding.eot_token
    assert len(theirs) == encoding.n_vocab


def opened_by_transformers(encoding, folder, home="LlamaForCausalLM"):
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    export_hf.write_folder(folder, gpt(vocab_size=encoding.n_vocab, **HOMES[home]), encoding, "")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("number", range(3))
def test_transformers_gives_the_same_ids(number, home, tmp_path):
    """Whatever tokenizer the class was published with."""
    encoding = tokenizers_of(ALPHABET)[number]
    theirs = opened_by_transformers(encoding, tmp_path / "it", home)
    check_same_ids(encoding, theirs)
    if encoding.name == "characters":
        with pytest.raises(Exception, match="WordLevel"):  # the library has no other class for it
            theirs("Ж")


def test_transformers_gives_gpt2s_ids(gpt2, tmp_path):
    theirs = opened_by_transformers(gpt2, tmp_path / "it")
    points = [*range(0x20), *range(0x7F, 0xA1), *range(0x2000, 0x2070), 0x3000, 0xFEFF, 0x1F600]
    blanks = "".join(f"a{chr(point)}{chr(point)} b{chr(point)}'s9" for point in points)
    check_same_ids(gpt2, theirs, [*TEXTS, blanks])


# --- the model, as transformers opens it


def opened(folder, model, encoding=None):
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    if encoding is not None:
        export_hf.write_folder(folder, model, encoding, "")
    found, said = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said  # neither missing nor unexpected
    return found


def check_same_model(model: GPT, theirs, vocab_size: int) -> None:
    assert theirs.dtype == torch.float32
    assert type(theirs).__name__ == huggingface.architecture(model.config)
    prompts = torch.randint(vocab_size - 1, (2, N), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(prompts)
        assert ours.abs().max() > 0.5
        torch.testing.assert_close(theirs(prompts).logits, ours, atol=1e-4, rtol=0)
    drawn = [[], []]
    for step in generate(model, prompts.tolist(), max_new_tokens=20, temperature=0.0, stop_token=vocab_size - 1):
        for row, token in step:
            drawn[row].append(token)
    found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False)
    for row, tokens in zip(drawn, found[:, N:].tolist(), strict=True):
        assert row == tokens[: len(row)]
        assert len(row) == 20 or row[-1] == vocab_size - 1


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(("tied", "kv_heads"), [(True, 4), (False, 2)])
def test_transformers_computes_the_same(home, tied, kv_heads, tmp_path):
    model = gpt(vocab_size=257, tie_embeddings=tied, num_kv_heads=kv_heads, **HOMES[home])
    check_same_model(model, opened(tmp_path / "it", model, build_tokenizer("bytes")), 257)


@pytest.mark.parametrize("home", ["MistralForCausalLM", "Qwen3ForCausalLM", "ArceeForCausalLM gelu"])
def test_ours_to_theirs_and_back(home, tmp_path, monkeypatch):
    """The folder as model.name and tokenizer of a run of ours: logits, greedy text, ids."""
    pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    from tests.huggingface_models import pytorch_on_a_cpu

    pytorch_on_a_cpu(monkeypatch)
    model, encoding, folder = gpt(vocab_size=257, **HOMES[home]), build_tokenizer("bytes"), str(tmp_path / "it")
    export_hf.write_folder(tmp_path / "it", model, encoding, "")
    config = resolve_model(GPTConfig(name=folder, attention="tiled", loss="plain"), "cpu", torch.float32)[0]
    back = build_model(config, 257, 64, device="cpu").eval()
    prompt = torch.arange(60, 60 + N)[None]
    with torch.no_grad():
        torch.testing.assert_close(back(prompt), model(prompt), atol=1e-4, rtol=0)
    tokens = [row[0][1] for row in generate(model, prompt.tolist(), max_new_tokens=20, temperature=0.0)]
    found = [row[0][1] for row in generate(back, prompt.tolist(), max_new_tokens=20, temperature=0.0)]
    assert found == tokens
    assert build_tokenizer(folder).encode_ordinary(CORPUS + TEXT) == encoding.encode_ordinary(CORPUS + TEXT)


def test_a_trained_run_in_transformers(run, exported):
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    model, encoding = export_hf.load_trained(open_checkpoint(run), "cpu", torch.float32, attention="naive")
    check_same_model(model, opened(exported, model), encoding.n_vocab)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    text = "quick brown fox"
    assert theirs(text)["input_ids"] == encoding.encode_ordinary(text)
    assert theirs.decode(theirs(text)["input_ids"]) == text


def test_a_padded_batch_in_transformers_continues_as_ours(run, exported):
    transformers = pytest.importorskip("transformers", reason="needs transformers: uv run --group hf")
    model, encoding = export_hf.load_trained(open_checkpoint(run), "cpu", torch.float32, attention="naive")
    texts = ["the quick", "j", "five dozen"]
    ours = {number: [] for number in range(3)}
    prompts = [encoding.encode_ordinary(text) for text in texts]
    for step in generate(model, prompts, max_new_tokens=8, temperature=0):
        for number, token in step:
            ours[number].append(token)
    batch = transformers.AutoTokenizer.from_pretrained(exported)(texts, return_tensors="pt", padding=True)
    theirs = opened(exported, model).generate(**batch, max_new_tokens=8, do_sample=False)
    assert theirs[:, batch["input_ids"].size(1) :].tolist() == list(ours.values())


def test_a_path_of_two_parts_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private" / "tok").mkdir(parents=True)
    found = [export_hf._public(name) for name in ("private/tok", "openai/gpt2", "bytes")]
    assert found == ["tok", "openai/gpt2", "bytes"]
