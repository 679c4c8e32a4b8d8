"""What the configuration says about the text, and how it is turned into tokens."""

import itertools
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SOURCES = ("embedded", "text", "hub")
TOKENIZERS = ("bytes", "characters", "gpt2")
DOCUMENTS = ("rows", "wikitext")
MAX_WORKERS = 1024  # more than a machine has cores; each holds a piece of text

# keys that only some sources read; the others would ignore them
_HUB = ("name", "config", "revision", "split", "validation_split", "streaming", "local_dir", "documents")
_KEYS = {"files": ("text",), "text_field": ("text", "hub")} | dict.fromkeys(_HUB, ("hub",))


@dataclass
class DataConfig:
    """Where the text comes from and how long a training sequence is."""

    source: str = "embedded"  # embedded (Python's language reference) | text (your own files) | hub (Hugging Face)
    # `Any`, as a structured configuration refuses a string for a list; after __post_init__ None or a list of strings
    files: Any = None  # text only: a path, a glob, or several as [a.txt,b.jsonl]
    text_field: str = "text"  # the column of JSONL, parquet and hub rows that holds the text
    name: str | None = None  # hub only: the dataset, such as "HuggingFaceFW/fineweb-edu"
    config: str | None = None  # hub only: its configuration ("subset" on its page), such as "sample-10BT"
    revision: str | None = None  # hub only: a commit or tag; null: the newest when the text is first tokenized
    split: str = "train"  # hub only: the training split; "train[:1%]" works, but not with streaming or local_dir
    validation_split: str | None = None  # hub only: the held-out split; null: the last validation_fraction of `split`
    streaming: bool = False  # hub only: stores only the tokens on disk; reads 3 times without a validation_split
    local_dir: str | None = None  # hub only: a folder laid out as the dataset is on the hub, read in its place
    documents: str = "rows"  # hub only: rows (a row is one) | wikitext (a row is a line, a title begins an article)
    validation_fraction: float = 0.1  # the last part of the text's characters, held out if there is no validation split
    seq_len: int = 128  # tokens per training sequence
    shift_windows: bool = False  # each epoch cuts the text at other places, for a text that is read many times
    document_mask: bool = False  # documents in one sequence do not see each other; positions begin anew in each
    cache_dir: str = "~/.cache/flashgpt/data"  # where tokenized text is kept
    num_workers: int = 2  # threads that tokenize

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source} is not known; use one of {', '.join(SOURCES)}")
        if self.documents not in DOCUMENTS:
            raise ValueError(f"data.documents={self.documents} is not known; use one of {', '.join(DOCUMENTS)}")
        if self.files is not None:
            self.files = list(self.files) if isinstance(self.files, list | tuple) else [self.files]
            if not all(isinstance(file, str) and file for file in self.files):
                raise ValueError(
                    f"data.files={self.files} must be paths; use data.files=a.txt or data.files=[a.txt,b.txt]"
                )
        for field in fields(self):
            if getattr(self, field.name) == "":
                remedy = "leave it out" if field.default is None else f"use data.{field.name}={field.default}"
                raise ValueError(f"data.{field.name}='' is empty; {remedy}")
        self._check_source()
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"data.validation_fraction={self.validation_fraction} must lie between 0 and 1; use 0.1")
        for key in ("seq_len", "num_workers"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)} must be at least 1")
        if self.num_workers > MAX_WORKERS:
            raise ValueError(f"data.num_workers={self.num_workers} must be at most {MAX_WORKERS}")

    def _check_source(self) -> None:
        """Keys that belong to one source are needed there and refused elsewhere, where they would be ignored."""
        if self.source == "text" and not self.files:
            raise ValueError("data.source=text needs data.files; use data.files=corpus.txt or data.files='books/*.txt'")
        if self.source == "hub":
            self._check_hub()
        for key, owners in _KEYS.items():
            value = getattr(self, key)
            if value and value != getattr(DataConfig, key) and self.source not in owners:
                owner = " or ".join(f"data.source={owner}" for owner in owners)
                unset = {None: "null", False: "false"}.get(default := getattr(DataConfig, key), default)
                raise ValueError(
                    f"data.{key}={value} is read only with {owner}, and data.source={self.source}; use {owner}, or "
                    f"data.{key}={unset}"
                )

    def _check_hub(self) -> None:
        if not self.name and not self.local_dir:
            raise ValueError("data.source=hub needs data.name=OWNER/NAME, or data.local_dir=FOLDER with a copy of it")
        if self.name and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.name) or self.name[0] in "./"):
            raise ValueError(
                f"data.name={self.name} is no dataset of the Hugging Face hub; use OWNER/NAME, "
                "or data.local_dir=FOLDER with a copy of one"
            )
        if self.local_dir and self.revision:
            raise ValueError(
                f"data.revision={self.revision} is a commit of the hub, and data.local_dir={self.local_dir} is read as "
                "it lies; use data.revision=null, or leave data.local_dir out"
            )
        if self.validation_split and _overlap(self.split, self.validation_split):
            raise self.trained_on()
        if self.validation_split and self.validation_fraction != DataConfig.validation_fraction:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} holds out the end of data.split, and "
                f"data.validation_split={self.validation_split} is held out in its place; leave the first out, or use "
                "data.validation_split=null"
            )

    def trained_on(self) -> ValueError:
        """The error for a data.validation_split that has rows of data.split."""
        return ValueError(
            f"data.validation_split={self.validation_split} has rows that are trained on (data.split={self.split}); "
            "hold out others, or leave it out for the last data.validation_fraction"
        )


def _overlap(one: str, other: str) -> bool:
    """Whether two splits certainly have rows in common; two slices of one split may have none, which is known only
    when they are read (data/hub.py)."""
    for a, b in itertools.product(re.split(r"\s*\+\s*", one), re.split(r"\s*\+\s*", other)):
        wholes = {part for part in (a, b) if "[" not in part}
        if a == b or "all" in wholes or (wholes and a.partition("[")[0] == b.partition("[")[0]):
            return True
    return False


def check_tokenizer(name: str) -> None:
    """Raise ValueError unless there may be a tokenizer of that name: one of ours, a folder, OWNER/NAME of the hub."""
    if name not in TOKENIZERS and "/" not in name and not (name and Path(name).is_dir()):
        raise ValueError(
            f"tokenizer={name} is not known; use one of {', '.join(TOKENIZERS)}, or a folder with a tokenizer.json"
        )


def expanded(key: str, path: str) -> Path:
    """`path`, the value of data.`key`, with its ~ expanded. Raises ValueError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"data.{key}={path} names no home ({error}); write the whole path") from error
