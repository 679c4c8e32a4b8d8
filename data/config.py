"""What the configuration says about the text, and how it is turned into tokens."""

from dataclasses import dataclass
from typing import Any

SOURCES = ("embedded", "wikitext", "text")
TOKENIZERS = ("bytes", "characters", "gpt2")

# configurations of Salesforce/wikitext on the Hugging Face hub; "raw" has no <unk> in place of rare words
WIKITEXT_NAMES = ("wikitext-2-raw-v1", "wikitext-103-raw-v1", "wikitext-2-v1", "wikitext-103-v1")


@dataclass
class DataConfig:
    """Where the text comes from and how long a training sequence is."""

    source: str = "embedded"  # embedded (Python's language reference) | wikitext | text (your own files)
    name: str | None = None  # wikitext only: the hub's configuration, as "wikitext-2-raw-v1"
    # text only: one path or several; globs allowed. `Any`, because a command line may say files=a.txt or files=[a.txt]
    # and a structured configuration refuses a string for a list; after __post_init__ it is None or a list of strings
    files: Any = None  # text only: a path, a glob, or several as [a.txt,b.jsonl]
    local_dir: str | None = None  # wikitext only: a folder with WikiText's own files, in place of the hub
    validation_fraction: float = (
        0.1  # embedded and text: the last part of the characters is held out; WikiText has its own
    )
    seq_len: int = 128  # tokens of a training sequence
    document_mask: bool = False  # documents in one sequence do not see each other, and positions begin anew in each
    cache_dir: str = "~/.cache/flashgpt/data"  # where tokenized text is kept
    num_workers: int = 2  # threads that tokenize

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"data.source={self.source} is not known; use one of {', '.join(SOURCES)}")
        if self.files is not None:
            self.files = [self.files] if isinstance(self.files, str) else list(self.files)
            if not all(isinstance(file, str) and file for file in self.files):
                raise ValueError(
                    f"data.files={self.files} must be paths; use data.files=a.txt or data.files=[a.txt,b.txt]"
                )
        self._check_source()
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"data.validation_fraction={self.validation_fraction} must lie between 0 and 1; use 0.1")
        for key in ("seq_len", "num_workers"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}={getattr(self, key)} must be at least 1")

    def _check_source(self) -> None:
        """Keys that belong to one source are needed there and refused elsewhere, where they would be ignored."""
        if self.source == "text" and not self.files:
            raise ValueError("data.source=text needs data.files; use data.files=corpus.txt or data.files='books/*.txt'")
        if self.source == "wikitext" and self.name not in WIKITEXT_NAMES:
            raise ValueError(f"data.name={self.name} is not a WikiText; use one of {', '.join(WIKITEXT_NAMES)}")
        for key, owner in (("files", "text"), ("local_dir", "wikitext"), ("name", "wikitext")):
            value = getattr(self, key)
            if value and self.source != owner:
                raise ValueError(f"data.{key}={value} is for data.source={owner}, not {self.source}; drop it")


def check_tokenizer(name: str) -> None:
    """ValueError unless there is a tokenizer of that name."""
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer={name} is not known; use one of {', '.join(TOKENIZERS)}")
