"""Where text comes from: Python's language reference, your own files, or the Hugging Face hub.

`open_source` checks that the source is there and says what it is (`identity`, from content alone, never from paths);
its splits are read later, and only if no tokenized copy is at hand. A split is a stream of fragments (text, first),
where `first` marks the beginning of a document.

Held-out text. A hub dataset may have a validation split. Else the last `validation_fraction` of the characters is held
out, as nanoGPT does for Shakespeare; the document at the cut is divided.
"""

import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from data import hub, textfiles, wikitext
from data.config import DataConfig, expanded
from data.tokenize import Fragment, head, tail

Stream = Callable[[], Iterator[Fragment]]

# how WikiText's rows are usually read: the fingerprint leaves this out, as that of the first releases did
WIKITEXT_READ = {"splits": ["train", "validation", None], "text_field": "text"}
# keys that cut or choose; WikiText's own files are read as they lie, so each has its default there
CHOOSING = ("split", "validation_split", "text_field", "streaming", "validation_fraction")


@dataclass(frozen=True)
class Source:
    """Text, not yet read.

    identity: JSON-able; two sources with the same identity give the same splits, wherever they lie.
    about: JSON-able; what else a reader of the manifest wants to know (names, versions). For a dataset of the hub
        `splits` adds the commit.
    splits: opens each split's stream: {"train": ..., "validation": ...}.
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
        files, field = textfiles.inspect(textfiles.find(data.files)), data.text_field
        textfiles.refuse_copies(files)
        identity = {
            "source": "text",
            "files": [file.identity for file in files],
            "validation_fraction": data.validation_fraction,
        }
        if field != textfiles.FIELD:  # the fingerprints of the first releases lack this key
            if all(file.kind == "text" for file in files):
                raise ValueError(f"data.text_field={field} names a column, and text files have none; drop it")
            identity["text_field"] = field

        def documents() -> Iterator[Fragment]:
            for file in files:
                yield from textfiles.read(file, field)

        names = {"names": [file.path.name for file in files]}
        return Source("text", identity, names, lambda: hold_out(documents, data.validation_fraction))
    assert data.source == "hub", "each of SOURCES has a branch"
    return _hub(data)


def _hub(data: DataConfig) -> Source:
    """A dataset of the hub, or its copy in data.local_dir, which may also hold WikiText's own files."""
    label = re.sub(r"[^\w.+-]", "_", data.config or (data.name or "hub").rpartition("/")[2])  # part of a file's name
    folder = expanded("local_dir", data.local_dir) if data.local_dir else None
    if folder and not folder.is_dir():
        raise ValueError(f"data.local_dir={folder} is not a folder; give a path from {Path.cwd()}")
    if not folder and Path(data.name).is_dir():  # `datasets` would read it
        raise ValueError(f"data.name={data.name} is a folder in {Path.cwd()}; use data.local_dir={data.name}")
    if folder and data.documents == "wikitext" and (found := wikitext.find(folder)):
        for key in CHOOSING:
            value = getattr(data, key)
            if value != getattr(DataConfig, key) and (key, value) != ("validation_split", "validation"):
                raise ValueError(
                    f"data.{key}={value} is not for data.local_dir={folder}, which holds WikiText's own files: train "
                    "and validation as they lie; leave it out"
                )
        files = dict(zip(found, textfiles.inspect(list(found.values())), strict=True))
        rows = {split: partial(textfiles.lines, file) for split, file in files.items()}
        return Source(
            label,
            {"source": "wikitext", "files": {split: file.identity for split, file in files.items()}},
            {"name": label, "names": {split: file.path.name for split, file in files.items()}},
            lambda: {split: partial(_documents, of_split, "wikitext") for split, of_split in rows.items()},
        )
    identity: dict[str, Any] = {"source": "wikitext" if data.documents == "wikitext" else "hub"}
    hashes: dict[str, str] = {}
    versions: dict[Path, textfiles.Version] = {}
    if folder:
        hashes, versions = hub.hash_folder(folder)
        identity |= {"name": data.config, "files": hashes}
    else:
        identity |= {"hub": data.name, "name": data.config, "revision": data.revision}
    # None: fingerprints once had a test split
    read = {"splits": [data.split, data.validation_split, None], "text_field": data.text_field}
    if data.documents != "wikitext" or read != WIKITEXT_READ:
        identity |= read
    if not data.validation_split:
        identity["validation_fraction"] = data.validation_fraction
    about: dict[str, Any] = {}

    def splits() -> dict[str, Stream]:
        opened, about["commit"] = hub.open_splits(data, folder, hashes, versions)
        streams = {split: partial(_documents, rows, data.documents) for split, rows in opened.items()}
        return streams if "validation" in streams else hold_out(streams["train"], data.validation_fraction)

    return Source(label, identity, about, splits)


def _documents(rows: Callable[[], Iterator[str]], kind: str) -> Iterator[Fragment]:
    """The documents of `rows`, of one kind of data.documents; a row without text is none."""
    return wikitext.articles(rows()) if kind == "wikitext" else ((text, True) for text in rows() if text)


def hold_out(stream: Stream, fraction: float) -> dict[str, Stream]:
    """The stream cut in two by characters: train, then validation. Reads it once to count them."""
    total = sum(len(text) for text, _ in stream())
    train = int(total * (1 - fraction))
    return {"train": lambda: head(stream(), train), "validation": lambda: tail(stream(), train)}


def embedded_topics() -> list[str]:
    """The Python language reference that every CPython carries for its `help()`; each topic is a document.

    A fifth of `pydoc_data.topics` occurs twice, as many topics are also sections of a longer one; 8% of the last
    tenth would be known from training. So a paragraph of 40 characters or more is kept only where it occurs first, and
    a topic with nothing left but its title is dropped. Blanks at the ends of lines are cut; nothing else is changed.
    About 377 kB of the 465 remain (CPython 3.11); the text differs between Python versions.
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
