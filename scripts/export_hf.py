"""Export a trained model: `python -m scripts.export_hf checkpoint=RUN folder=FOLDER`.

FOLDER is then a model in the format of transformers and the Hugging Face hub, and opens with

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

It holds config.json and generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json, and
README.md, a model card with the run's figures. model/huggingface_weights.py says which class of transformers each
model becomes; a model without one is refused. transformers is not needed here. Without `checkpoint` the newest run is
exported. FOLDER appears once it is whole, and nothing is overwritten. The last line is one JSON object.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch
import yaml

from conf.program import program
from data.tokenizer_file import FileEncoding, read_config
from data.tokenizer_json import tokenizer_json
from model import GPT
from model.huggingface_weights import architecture, config_json, tensors
from training.checkpoint import META, Checkpoint, open_checkpoint
from training.checkpoint_files import free_folder, whole_folder, write_json, write_weights
from training.curves import read_run
from training.trained import given_or_newest, load_trained

# what the card needs of a checkpoint's description
NEEDED = {
    "settings": {"data": {"source": str}, "tokenizer": str, "optim": {}, "train": {"batch_tokens": int}},
    "data_fingerprint": str,
}


@dataclass
class ExportSettings:
    checkpoint: str | None = None  # a checkpoint or a run's folder; null: the newest under runs/
    folder: str = ""  # where the model will be: a new folder, or an empty one


@program("tool", ExportSettings)
def main(settings: ExportSettings, run_dir: Path) -> None:
    folder = free_folder(settings.folder)
    checkpoint = open_checkpoint(given_or_newest(settings.checkpoint))
    model, tokenizer = load_trained(checkpoint, "cpu", torch.float32, attention="naive")
    checkpoint.require(NEEDED, checkpoint.meta, META)
    name, parameters = described(model)
    write_folder(folder, model, tokenizer, model_card(folder.name, checkpoint, model))
    print(f"{checkpoint.path} after {checkpoint.step} steps is {name} in {folder}")
    result = {"checkpoint": str(checkpoint.path), "folder": str(folder), "architecture": name}
    print(json.dumps(result | {"parameters": parameters}))


def write_folder(folder: Path, model: GPT, tokenizer: tiktoken.Encoding, card: str) -> None:
    """Write all files of `folder`, or none; OSError where the disk is full."""
    end_of_text = tokenizer.eot_token
    word, theirs = tokenizer.decode_bytes([end_of_text]).decode(), isinstance(tokenizer, FileEncoding)
    contents: dict[str, Any] = {
        "tokenizer.json": json.loads(tokenizer.alphabet)["tokenizer"] if theirs else tokenizer_json(tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",  # else the original Llama's or Qwen's is loaded
            "bos_token": word,
            "eos_token": word,
            "pad_token": word,  # as generation_config.json has it
            "padding_side": "left",  # a batch that is padded on the right continues its padding
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": model.seq_len,
        },
    }
    if model.config.name is not None and theirs:  # it has its own bos and chat template
        try:
            contents["tokenizer_config.json"] = read_config(tokenizer.name)
        except (OSError, ValueError) as error:
            reason = str(error).partition(" (")[0]
            print(f"tokenizer  without its chats and its beginning of a text: {reason}", flush=True)
    if model.config.name is None:
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text)
        contents |= {"config.json": config_json(model, end_of_text), "generation_config.json": ends}
    with whole_folder(folder) as temporary:
        if model.config.name is None:
            write_weights(tensors(model), temporary / "model.safetensors", metadata={"format": "pt"})
        else:
            model.save(temporary)
        for name, content in contents.items():
            write_json(content, temporary / name)
        (temporary / "README.md").write_text(card, encoding="utf-8")


def described(model: GPT) -> tuple[str, int]:
    """The model's class in transformers, and the number of weights in the folder.

    The folder leaves out padded rows and adds gains of norms, which our GPT does not have.
    """
    if model.config.name is not None:
        return type(model.inner).__name__, model.num_parameters()
    return architecture(model.config), sum(weight.numel() for weight in tensors(model).values())


def model_card(name: str, checkpoint: Checkpoint, model: GPT) -> str:
    """README.md: how to use the model, what it was trained on and how well it does, and with which settings."""
    settings = checkpoint.meta["settings"]
    data, train = settings["data"], settings["train"]
    files = ", ".join(Path(file).name for file in data.get("files") or [])
    text = " ".join(filter(None, [data["source"], data.get("name"), data.get("config"), files]))
    commit = (checkpoint.meta.get("provenance") or {}).get("commit")
    name_of_class, parameters = described(model)
    figures = {
        "architecture": f"{name_of_class}, {parameters:,} parameters",
        "data": f"{text}, fingerprint {checkpoint.meta['data_fingerprint'][:12]}",
        "tokenizer": f"{_public(settings['tokenizer'])}, {model.vocab_size:,} tokens",
        "context": f"{model.seq_len:,} tokens",
        "trained on": f"{checkpoint.step * train['batch_tokens']:,} tokens, {checkpoint.step:,} steps",
        **validation(checkpoint),
        "commit": commit or "unknown",
    }
    (about, terms), base = ABOUT, model.config.name
    if base is not None:
        base = _public(base)
        about, terms = f"{base}, trained further on the text below.", f"What {base} has holds on."
    if began := "an earlier run" if settings.get("init_from") else base:
        figures["trained on"] += f", from the weights of {began}"
    rows = "\n".join(f"| {key} | {value} |" for key, value in figures.items())
    shown = {key: settings[key] for key in ("model", "optim", "train")}
    if model.config.name is not None:  # the other keys describe a GPT of ours
        shown["model"] = {"name": base} | {key: settings["model"][key] for key in ("dropout", "attention_dropout")}
    settings_yaml = yaml.safe_dump(shown, sort_keys=False).strip()
    return CARD.format(name=name, about=about, rows=rows, settings=settings_yaml, terms=terms)


def _public(name: str) -> str:
    """Return a name of ours or of the hub as it is, and of a path, which is private, only the last part."""
    of_the_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and not Path(name).is_dir()
    return name if of_the_hub else Path(name).resolve().name


def validation(checkpoint: Checkpoint) -> dict[str, str]:
    """The last figures on held-out text up to this checkpoint, from the metrics of the run whose folder holds it."""
    run = checkpoint.path.parent.parent
    records = read_run(run)["records"] if (run / "metrics.jsonl").is_file() else []
    evaluated = [r for r in records if r.get("val_bits_per_byte") is not None and r["step"] <= checkpoint.step]
    if not evaluated:
        return {"validation loss": "not known: the run's metrics.jsonl has none for this checkpoint"}
    last = evaluated[-1]
    return {
        "validation loss": f"{last['val_loss']:.4f} nats a token, after {last['step']:,} steps",
        "bits per byte": f"{last['val_bits_per_byte']:.4f}",
    }


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{about}

| | |
|---|---|
{rows}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50, do_sample=True, top_k=200, temperature=0.8)[0]))
```

## Settings

```yaml
{settings}
```

## License

{terms} The training code is under MIT.
"""
ABOUT = (  # about a GPT that was trained from scratch, and its terms
    "A language model. It continues text; it was not taught to follow instructions.",
    "None is stated: that is for whoever trained it to say, by the terms of the text above.",
)

if __name__ == "__main__":
    main()
