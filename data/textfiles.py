"""Local files of text, JSON lines and parquet.

A text file is one document; a row of a JSONL or parquet file is one document, in its column data.text_field (rows with
an empty text are skipped). Text is UTF-8; line ends of a text file, not those within a row, become "\\n", and a
byte-order mark at the beginning is left out. Files are read in place, a part at a time; only a JSON list is read whole.
`datasets` would read JSON by columns, and turn every text of a column with a number into quoted JSON; so rows are
parsed here, and a wrong row is named.
"""

import codecs
import glob
import hashlib
import json
import os
import reprlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from data.config import expanded
from data.shards import file_sha256
from data.tokenize import PIECE_CHARACTERS, Fragment

FIELD = "text"  # the default of data.text_field
_READ_BYTES = 1 << 22  # bytes of a text file, hashed at a time
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}  # any other ending is text's
_ROWS = 4096  # rows of a parquet file, read at a time


class Version(NamedTuple):
    """What a change of a file changes: who copies over it may keep the first. Both times in ns."""

    modified: int
    bytes: int
    inode_changed: int

    @classmethod
    def of(cls, path: Path) -> "Version":
        found = path.stat()
        return cls(found.st_mtime_ns, found.st_size, found.st_ctime_ns)


@dataclass(frozen=True)
class TextFile:
    """A file that exists and has content. kind: "text", "json" or "parquet"."""

    path: Path
    kind: str
    sha256: str
    version: Version  # before it was hashed
    marked: bool = False  # whether a text file begins with a byte-order mark, which is not part of the text

    @property
    def identity(self) -> dict[str, str | int]:
        """What the file is, wherever it lies and whatever its name."""
        own = {"kind": self.kind, "bytes": self.version.bytes, "sha256": self.sha256}
        return own | {"mark": "left out"} if self.marked else own  # in older caches it is text


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
            with readable(path):
                there = {file.suffix for file in path.iterdir()}
            if not there:
                raise ValueError(f"data.files={pattern} is an empty folder; give one with files, or a file")
            named = next((f"*{ending}" for ending in (".txt", *KINDS) if ending in there), "**")  # in its folders, too
            files = shlex.quote(f"{glob.escape(pattern.rstrip('/'))}/{named}")
            raise ValueError(f"data.files={pattern} is a folder; use data.files={files}")
        if there:
            paths.append(path)
            continue
        for number, part in enumerate(path.parts):
            if glob.has_magic(part):
                for folder in filter(Path.is_dir, map(Path, glob.glob(str(Path(*path.parts[:number]))))):
                    refuse_unlisted(folder, deep=part == "**")
            if part == "**":
                break
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if not matches:
            several = f", or several as data.files=[{pattern}]" if "," in pattern else ""
            found = "matches no file" if glob.has_magic(pattern) else "does not exist"
            raise ValueError(f"data.files={pattern} {found}; give a path from {Path.cwd()}{several}")
        paths += matches
    return paths


def refuse_copies(files: list[TextFile]) -> None:
    """Refuse a file that comes twice, links and copies too: what is held out of one would be trained on in another."""
    first: dict[str, TextFile] = {}
    for file in files:
        if (other := first.setdefault(file.sha256, file)) is not file:
            one, path = other.path, file.path
            both = f"one {'file' if one.samefile(path) else 'text'} twice, as {one} and {path}"
            raise ValueError(f"data.files names {f'{path} twice' if one == path else both}; name it once")


def inspect(paths: list[Path]) -> list[TextFile]:
    """Hash every file (2 GB/s a core) and check what can be said before parsing: not empty, and text is UTF-8."""
    files = []
    for path in paths:
        kind = KINDS.get(path.suffix.lower(), "text")
        with readable(path):
            version = Version.of(path)
            if not path.is_file():
                raise ValueError(f"{path} is a pipe or a device, and a text is read several times; give a file")
            if version.bytes == 0:
                raise ValueError(f"{path} is empty; leave it out")
            digest = file_sha256(path) if kind == "parquet" else _hash_utf8(path)
            with path.open("rb") as file:
                marked = kind == "text" and file.read(3) == codecs.BOM_UTF8
        files.append(TextFile(path, kind, digest, version, marked))
    return files


def refuse_unlisted(folder: Path, *, deep: bool = True) -> None:
    """Raise ValueError if `folder` or, with `deep`, one in it, not a hidden one, may not be listed: `glob` skips it in
    silence."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"folder {error.filename} cannot be read ({error.strerror}); make it readable, or name the others"
        ) from error

    for _, folders, _ in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if deep and not name.startswith(".")]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError about `path`, before it is parsed, into a ValueError of one line that names it."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); leave it out") from error


def read(file: TextFile, field: str = FIELD) -> Iterator[Fragment]:
    """The documents of one file. Raises ValueError naming the file, and the row, where it cannot be parsed."""
    if file.kind == "text":
        with _named(file), file.path.open(encoding="utf-8-sig") as stream:
            first = True
            # whole lines: where a line has no safe cut, `pieces` joins all of it again with every fragment
            while text := stream.read(PIECE_CHARACTERS) + stream.readline():
                yield text, first
                first = False
    else:
        texts = _json_texts(file, field) if file.kind == "json" else _parquet_texts(file, field)
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise ValueError(
                    f'{file.path}: row {number} has no text in its column "{field}" (it is {reprlib.repr(text)}); '
                    "drop it, or choose another column with data.text_field"
                )
            if text:
                yield text, True
    refuse_changed({file.path: file.version})


def _json_texts(file: TextFile, field: str) -> Iterator[Any]:
    """Yield the value of `field` in each row; None where a row lacks it. Rows are the lines that are not blank or, if
    the file is a list, its items."""
    place, columns = "", None  # in a list that is not JSON the error itself says where
    remedy = "write one object a line, or a list of them"  # an object over several lines is JSON too
    try:
        with file.path.open(encoding="utf-8-sig", newline="\n") as stream:
            while (first := stream.read(1)).isspace():
                pass
            stream.seek(0)
            is_list = first == "["
            rows = json.load(stream) if is_list else (line for line in stream if line.strip())
            for number, row in enumerate(rows, 1):
                place = f"row {number}: "
                row = row if is_list else json.loads(row)
                if not isinstance(row, dict):
                    raise ValueError(f'not an object, as {{"{field}": "..."}}')
                remedy = "correct or drop it"
                if number == 1 and field not in row:
                    columns = [*row]
                    break
                if isinstance(text := row.get(field), str):
                    text.encode()  # half a surrogate pair is no text
                yield text
    except (ValueError, OSError, RecursionError) as error:
        reason = str(error).partition(";")[0]  # without Python's own remedies
        raise ValueError(f"{file.path} cannot be read as json: {place}{reason}; {remedy}") from error
    if columns is not None:
        raise _no_column(file, field, columns)


def _no_column(file: TextFile, field: str, columns: list[str]) -> ValueError:
    found = ", ".join(filter(None, columns))
    remedy = f"only {found}; choose one with data.text_field" if found else f'nor another; write {{"{field}": "..."}}'
    return ValueError(f'{file.path} has no column "{field}", {remedy}')


def _parquet_texts(file: TextFile, field: str) -> Iterator[Any]:
    import pyarrow.parquet  # here: it takes half a second, and a tokenized copy is opened without it

    with _named(file), pyarrow.parquet.ParquetFile(file.path) as table:
        columns = table.schema_arrow.names
        if field in columns:
            for batch in table.iter_batches(_ROWS, columns=[field]):
                yield from batch.column(field).to_pylist()
    if field not in columns:
        raise _no_column(file, field, columns)


def lines(file: TextFile) -> Iterator[str]:
    """Lines of a text file with their line ends."""
    with _named(file), file.path.open(encoding="utf-8-sig") as stream:
        yield from stream
    refuse_changed({file.path: file.version})


def refuse_changed(versions: Mapping[Path, Version]) -> None:
    """Raise ValueError if a file has changed since it was hashed: its tokens would be cached as another text's.

    versions: each file's before it was hashed.
    """
    for path, before in versions.items():
        if not path.exists() or Version.of(path) != before:
            raise ValueError(f"{path} was changed while it was read; run again once it is complete, or use a copy")


@contextmanager
def _named(file: TextFile) -> Iterator[None]:
    """Turn what reading `file` raises into a ValueError of one line that names it."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, LookupError) as error:  # pyarrow's are among them
        first_line = str(error).strip().split("\n")[0].rstrip(".")
        raise ValueError(f"{file.path} cannot be read as {file.kind}: {first_line}; leave it out") from error


def _hash_utf8(path: Path) -> str:
    """SHA-256 of the file, refusing one that is not UTF-8 with the place of its first wrong byte."""
    digest, decoder, position = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        for block in chain(iter(lambda: file.read(_READ_BYTES), b""), (b"",)):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = position - pending + error.start
                raise ValueError(
                    f"{path} is not UTF-8 (byte {place:,}); unpack it, or convert it with iconv"
                ) from error
            digest.update(block)
            position += len(block)
    return digest.hexdigest()
