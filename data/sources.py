"""Where text comes from: Python's language reference, WikiText, or your own files.

`open_source` checks that the source is there and says what it is (`identity`, from content alone, never from paths);
its splits are read later, and only if no tokenized copy is at hand. A split is a stream of fragments (text, first),
where `first` marks the beginning of a document.

Held-out text. WikiText has its own validation and test splits. Of the other sources the last `validation_fraction` of
the characters is held out, as nanoGPT does for Shakespeare; the document at the cut is divided.
"""

import itertools
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from data import textfiles, wikitext
from data.config import DataConfig
from data.tokenize import Fragment, head, tail

Stream = Callable[[], Iterator[Fragment]]


@dataclass(frozen=True)
class Source:
    """Text, not yet read.

    identity: JSON-able; two sources with the same identity give the same splits, wherever they lie.
    about: JSON-able; what else a reader of the manifest wants to know (names, versions).
    splits: opens each split's stream: {"train": ..., "validation": ..., maybe "test": ...}.
    """

    label: str
    identity: dict[str, Any]
    about: dict[str, Any]
    splits: Callable[[], dict[str, Stream]]


def open_source(data: DataConfig) -> Source:
    """The source that `data` names. Raises ValueError, one line, where it is missing or unreadable."""
    if data.source == "embedded":
        topics = embedded_topics()
        digest = sha256("\0".join(topics).encode()).hexdigest()
        return Source(
            "embedded",
            {"source": "embedded", "sha256": digest, "validation_fraction": data.validation_fraction},
            {"text": "pydoc_data.topics", "python": platform.python_version()},
            lambda: hold_out(lambda: ((topic, True) for topic in topics), data.validation_fraction),
        )
    if data.source == "text":
        files = textfiles.inspect(textfiles.find(data.files))
        return Source(
            "text",
            {
                "source": "text",
                "files": [file.identity for file in files],
                "validation_fraction": data.validation_fraction,
            },
            {"names": [file.path.name for file in files]},
            lambda: hold_out(
                lambda: itertools.chain.from_iterable(map(textfiles.read, files)), data.validation_fraction
            ),
        )
    if data.local_dir:
        found = wikitext.find(Path(data.local_dir).expanduser())
        files = dict(zip(found, textfiles.inspect(list(found.values())), strict=True))
        return Source(
            data.name,
            {"source": "wikitext", "files": {split: file.identity for split, file in files.items()}},
            {"name": data.name, "names": {split: file.path.name for split, file in files.items()}},
            lambda: {
                split: lambda file=file: wikitext.articles(textfiles.lines(file)) for split, file in files.items()
            },
        )
    return Source(
        data.name,
        {"source": "wikitext", "hub": wikitext.REPOSITORY, "name": data.name, "revision": wikitext.REVISION},
        {},
        lambda: {
            split: lambda rows=rows: wikitext.articles(rows()) for split, rows in wikitext.from_hub(data.name).items()
        },
    )


def hold_out(stream: Stream, fraction: float) -> dict[str, Stream]:
    """The stream cut in two by characters: train, then validation. Reads it once to count them."""
    total = sum(len(text) for text, _ in stream())
    train = int(total * (1 - fraction))
    return {"train": lambda: head(stream(), train), "validation": lambda: tail(stream(), train)}


def embedded_topics() -> list[str]:
    """The Python language reference that every CPython carries for its `help()`; each topic is a document.

    A fifth of `pydoc_data.topics` stands there twice, as many topics are also sections of a longer one; 8% of the last
    tenth would be known from training. So a paragraph of 40 characters or more is kept only where it occurs first, and
    a topic of which nothing but its title is left is dropped. Blanks at the ends of lines go; nothing else is changed.
    About 377 kB of the 465 (CPython 3.11); it differs between Python versions.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", topics[name].strip("\n")):
            text = "\n".join(line.rstrip() for line in paragraph.split("\n"))
            if text in seen:
                continue
            if len(text) >= 40:
                seen.add(text)
            paragraphs.append(text)
        if len(paragraphs) > 1:
            kept.append("\n\n".join(paragraphs) + "\n")
    return kept
