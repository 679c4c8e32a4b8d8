"""Local files of text, JSON lines and parquet.

A text file is one document; a row of a JSONL or parquet file is one document, in its column data.text_field (rows with
an empty text are skipped). Text is UTF-8; line ends become "\\n". Text and parquet are streamed through `datasets`, and
nothing is copied to its cache. JSON it would read by columns, and make JSON with quotes of every text beside which a
number stands; so a line of JSON is parsed here, and a wrong row is named.
"""

import codecs
import glob
import hashlib
import json
import reprlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data.config import expanded
from data.shards import file_sha256, read_blocks
from data.tokenize import Fragment

FIELD = "text"  # the default of data.text_field
_ROWS = 4096  # rows handed over at a time: a line of prose is some 70 bytes, so a few hundred kB


@dataclass(frozen=True)
class TextFile:
    """A file that exists and has content. kind: "text", "json" or "parquet"."""

    path: Path
    kind: str
    bytes: int
    sha256: str

    @property
    def identity(self) -> dict[str, str | int]:
        """What the file is, wherever it lies and whatever its name."""
        return {"kind": self.kind, "bytes": self.bytes, "sha256": self.sha256}


def find(patterns: list[str]) -> list[Path]:
    """Paths of `data.files`: globs expanded and sorted, the order of the patterns kept."""
    paths = []
    for pattern in patterns:
        path = expanded("files", pattern)
        try:
            there = path.exists()
        except OSError as error:  # a name too long
            raise ValueError(f"data.files={pattern} cannot be a file ({error.strerror}); check the path") from error
        if path.is_dir():
            raise ValueError(f"data.files={pattern} is a folder; use data.files='{pattern.rstrip('/')}/*.txt'")
        if there:
            paths.append(path)
            continue
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if not matches:
            raise ValueError(f"data.files={pattern} does not exist; give a path from {Path.cwd()}")
        paths += matches
    return paths


def inspect(paths: list[Path]) -> list[TextFile]:
    """Hash every file (2 GB/s a core) and check what can be said before parsing: not empty, and text is UTF-8."""
    files = []
    for path in paths:
        kind = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix, "text")
        try:
            size = path.stat().st_size
            if size == 0:
                raise ValueError(f"{path} is empty; leave it out")
            digest = file_sha256(path) if kind == "parquet" else _hash_utf8(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); leave it out") from error
        files.append(TextFile(path, kind, size, digest))
    return files


def read(file: TextFile, field: str = FIELD) -> Iterator[Fragment]:
    """The documents of one file. Raises ValueError naming the file, and the row, where it cannot be parsed."""
    if file.kind == "text":
        first = True
        for text in lines(file, joined=True):
            yield text, first
            first = False
        return
    texts = _json_texts(file, field) if file.kind == "json" else chain.from_iterable(_columns(file, field))
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise ValueError(
                f'{file.path}: row {number} has no text in its column "{field}" (it is {reprlib.repr(text)}); drop it'
            )
        if text:
            yield text, True


def _json_texts(file: TextFile, field: str) -> Iterator[Any]:
    """What each row holds in `field`; None where it lacks it. Rows are lines, or the items of one list."""
    number = 0
    try:
        for row in _json_rows(file):
            number += 1
            if isinstance(row, str):
                row = json.loads(row)
            if not isinstance(row, dict):
                raise ValueError(f'not an object, as {{"{field}": "..."}}')
            if number == 1 and field not in row:
                raise ValueError(_no_column(field, list(row)))
            if isinstance(text := row.get(field), str):
                text.encode()  # half a surrogate pair is no text
            yield text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.path} cannot be read as json: row {number}: {error}; correct or drop it") from error


def _json_rows(file: TextFile) -> Iterator[Any]:
    """Lines, not yet parsed, but for blank ones; or the items of the list that the file is."""
    with file.path.open(encoding="utf-8-sig", newline="\n") as stream:
        if stream.read(1) == "[":
            stream.seek(0)
            yield from json.load(stream)
        else:
            stream.seek(0)
            yield from (line for line in stream if line.strip())


def _no_column(field: str, columns: list[str]) -> str:
    return f'no column "{field}", only {", ".join(columns)} (choose one with data.text_field)'


def lines(file: TextFile, *, joined: bool = False) -> Iterator[str]:
    """Lines of a text file with their line ends; `joined` gives a few thousand at a time as one string."""
    for column in _columns(file, FIELD, keep_linebreaks=True):
        if joined:
            yield "".join(column)
        else:
            yield from column


def _columns(file: TextFile, field: str, **options: bool) -> Iterator[list]:
    """The column of texts, some rows at a time."""
    # imported here: it takes two seconds, and a tokenized copy is opened without it
    from datasets.exceptions import DatasetsError
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    # the readers behind load_dataset("text", ...), without its request to the hub's download counter for each file
    reader = {"text": Text, "parquet": Parquet}[file.kind]
    if file.kind == "parquet":
        options["batch_size"] = _ROWS  # else the size of the first row group, which may be nothing
    # a path may hold the signs of a glob, which `datasets` would expand
    data_files = {"train": [glob.escape(str(file.path.absolute()))]}
    with tempfile.TemporaryDirectory() as scratch:  # for its lock file; nothing else is written
        try:
            rows = reader(cache_dir=scratch, data_files=data_files, **options).as_streaming_dataset("train")
            for table in rows.with_format("arrow").iter(_ROWS):  # 3x faster than rows made Python objects
                if field not in table.column_names:
                    raise ValueError(_no_column(field, table.column_names))
                yield table[field].to_pylist()
        except (DatasetsError, ValueError, OSError) as error:  # pyarrow's errors are ValueErrors and OSErrors
            first_line = str(error).strip().split("\n")[0].rstrip(".")
            raise ValueError(f"{file.path} cannot be read as {file.kind}: {first_line}; leave it out") from error


def _hash_utf8(path: Path) -> str:
    """SHA-256 of the file, refusing one that is not UTF-8 with the place of its first wrong byte."""
    digest, decoder, position = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    for block in (*read_blocks(path), b""):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 (byte {position - pending + error.start:,}); convert it with iconv"
            ) from error
        digest.update(block)
        position += len(block)
    return digest.hexdigest()
