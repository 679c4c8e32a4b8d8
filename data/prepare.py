"""Tokenize a text ahead of a run, or check one that was.

    python -m data.prepare wikitext103 --tokenizer gpt2
    python -m data.prepare text --files 'books/*.txt' --tokenizer gpt2
    python -m data.prepare wikitext2 --local-dir ../shared/data/wikitext-2 --verify

The last line is one JSON object.
"""

import argparse
import json
import sys
from dataclasses import fields

from data.config import TOKENIZERS, DataConfig, TokenizerConfig
from data.dataset import Dataset, open_dataset

# what data=NAME is on train.py's command line
TEXTS = {
    "embedded": {"source": "embedded"},
    "wikitext2": {"source": "wikitext", "name": "wikitext-2-raw-v1"},
    "wikitext103": {"source": "wikitext", "name": "wikitext-103-raw-v1"},
    "text": {"source": "text"},
}


def main(arguments: list[str] | None = None) -> None:
    default = {field.name: field.default for field in fields(DataConfig)}
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description="Tokenize a text into the cache.")
    parser.error = lambda message: sys.exit(f"error: {message}; --help lists all")  # one line, without the usage
    parser.add_argument("text", choices=TEXTS)
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default=TokenizerConfig.name)
    parser.add_argument("--files", nargs="+", help="text: paths or globs")
    parser.add_argument("--local-dir", help="wikitext: a folder with its own files, in place of the hub")
    for key, help in (
        ("validation_fraction", "last part of the characters, held out"),
        ("cache_dir", "where the tokens go"),
        ("num_workers", "threads that tokenize"),
    ):
        flag = "--" + key.replace("_", "-")
        parser.add_argument(flag, type=type(default[key]), default=default[key], help=f"{help} ({default[key]})")
    parser.add_argument("--verify", action="store_true", help="check an existing set, prepare nothing")
    given = vars(parser.parse_args(arguments))
    tokenizer, verify = given.pop("tokenizer"), given.pop("verify")
    try:
        data = DataConfig(**TEXTS[given.pop("text")], **given, seq_len=1)
        dataset = open_dataset(data, TokenizerConfig(tokenizer), report=print, prepare=not verify)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(summary(dataset)))


def summary(dataset: Dataset) -> dict:
    counts = {
        split: {key: count for key, count in facts.items() if key != "shards"}
        for split, facts in dataset.manifest["splits"].items()
    }
    return {"path": str(dataset.path), "fingerprint": dataset.fingerprint, "splits": counts}


if __name__ == "__main__":
    main()
