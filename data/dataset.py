"""A tokenized text: prepared once into a folder of the cache, checked and opened ever after.

The folder's name ends in a fingerprint of the text's content, the way it is split and the tokenizer, so a changed file
gets a folder of its own. It holds shards and `manifest.json`. It is written under a temporary name and renamed when
complete: a process that sees the folder sees all of it, and if two processes prepare the same text, the second uses
what the first wrote.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.config import DataConfig, expanded
from data.shards import TokenArray, flush, open_split, token_dtype, verify, write_split
from data.sources import Source, Stream, open_source
from data.tokenize import Counts, tokenize
from data.tokenizer import build_tokenizer, tokenizer_from_state, tokenizer_label, tokenizer_state

FORMAT = 1  # raise it when the same text would give other tokens or another layout; old folders are then not used
MANIFEST = "manifest.json"
LOOKED_AT = 1_000_000  # tokens: a text is refused for its unknown ones only after so many, or at its end
MOST_UNKNOWN = 0.01  # share of a text's tokens that may stand for text without a token
_ABANDONED_SECONDS = 86_400  # a temporary folder this old belongs to a process that was killed

Report = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """Tokens of each split, memory-mapped, and what is known about them.

    tokens: split -> 1-D array of ids, uint16 or uint32; documents are separated by `end_of_text`.
    manifest: JSON-able; source, tokenizer, counts of each split, shards with their checksums.
    """

    path: Path
    manifest: dict[str, Any]
    tokenizer: tiktoken.Encoding
    tokens: dict[str, TokenArray]

    @property
    def train(self) -> TokenArray:
        return self.tokens["train"]

    @property
    def validation(self) -> TokenArray:
        return self.tokens["validation"]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.n_vocab

    @property
    def end_of_text(self) -> int:
        return self.tokenizer.eot_token

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]


def open_dataset(data: DataConfig, tokenizer: str, *, report: Report | None = None) -> Dataset:
    """The tokenized text that the configuration names, prepared first where it is not in the cache.

    `report` is called with lines about the work, for the console. Raises ValueError, one line, for a source that is
    missing or unreadable, a cache that cannot be written or was damaged, and a data.seq_len for which a split is too
    short.
    """
    source, identity, path = locate(data, tokenizer)
    say = report or (lambda line: None)
    if not os.path.lexists(path):  # `_open` refuses a link whose folder is gone
        _prepare(path, source, identity, tokenizer, data.num_workers, say)
    dataset = _open(path, identity)
    tokens = ", ".join(f"{split} {len(array):,}" for split, array in dataset.tokens.items())
    say(f"tokens: {tokens} ({dataset.train.dtype}, vocabulary {dataset.vocab_size:,}) in {path}")
    _refuse_too_long(data, dataset, "validation_fraction" in identity)
    return dataset


def locate(data: DataConfig, tokenizer: str) -> tuple[Source, dict[str, Any], Path]:
    """The source, what identifies its tokens (JSON-able; its `digest` is the fingerprint), and their folder, which may
    not exist yet. Hashes local files; uses the network only for a tokenizer that is OWNER/NAME.

    Raises ValueError for a source that is missing or unreadable.
    """
    source = open_source(data)
    label = tokenizer_label(tokenizer)
    identity = {"format": FORMAT, **source.identity, "tokenizer": label}
    name = f"{source.label}-{label}-{digest(identity)[:16]}"
    return source, identity, expanded("cache_dir", data.cache_dir) / name


def _refuse_too_long(data: DataConfig, dataset: Dataset, held_out: bool) -> None:
    """Raise ValueError if a split is too short, with the limit of the shorter one, so that the remedy suits both."""
    windows_of = {"train": 1 + data.shift_windows, "validation": 1}
    longest, split = min(((len(dataset.tokens[split]) - 1) // windows, split) for split, windows in windows_of.items())
    if data.seq_len <= longest:
        return
    needed = {name: windows * data.seq_len + 1 for name, windows in windows_of.items()}
    remedy = f"use data.seq_len={longest} or less" if longest > 1 else "use a longer text"
    if held_out and sum(len(dataset.tokens[name]) for name in needed) >= sum(needed.values()):
        remedy += f", or another data.validation_fraction than {data.validation_fraction}"
    asked = f"data.seq_len={data.seq_len}" + (" with data.shift_windows" if windows_of[split] > 1 else "")
    tokens = len(dataset.tokens[split])
    if tokens < 2:
        raise ValueError(f"the {split} split has {tokens} tokens and a prediction needs 2; {remedy}")
    raise ValueError(f"{asked} needs {needed[split]} tokens, the {split} split has {tokens}; {remedy}")


def _fingerprint(identity: dict[str, Any], about: dict[str, Any]) -> str:
    """The digest of `identity`; for a hub dataset without data.revision, with the commit that was read."""
    if "hub" in identity and identity["revision"] is None:
        identity = identity | {"revision": about["commit"]}
    return digest(identity)


def _open(path: Path, identity: dict[str, Any]) -> Dataset:
    """Check everything in the folder against its manifest, and the manifest against its own checksum."""
    remedy = f"delete {path} and run again"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        raise ValueError(f"{path / MANIFEST} is missing; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path / MANIFEST} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, KeyError, AttributeError, TypeError):  # not JSON, without a checksum, or not an object
        raise ValueError(f"{path / MANIFEST} is not a manifest; {remedy}") from None
    if checksum != digest(manifest):
        raise ValueError(f"{path / MANIFEST} was altered (its checksum is wrong); {remedy}")
    if manifest["fingerprint"] != _fingerprint(identity, manifest["about"]):
        raise ValueError(f"{path / MANIFEST} belongs to another text; {remedy}")
    dtype = np.dtype(manifest["dtype"])
    shards = {split: facts["shards"] for split, facts in manifest["splits"].items()}
    verify(path, [shard for split in shards.values() for shard in split], dtype)
    return Dataset(
        path,
        manifest,
        tokenizer_from_state(manifest["tokenizer"]),
        {split: open_split(path, of_split, dtype) for split, of_split in shards.items()},
    )


def _prepare(
    path: Path, source: Source, identity: dict[str, Any], tokenizer: str, num_workers: int, say: Report
) -> None:
    """Tokenize the source into `path`."""
    with _written_at_once(path) as folder:
        if tokenizer == "characters":
            splits = source.splits()
            encoding = build_tokenizer(tokenizer, _alphabet(splits["train"]))
        else:
            encoding = build_tokenizer(tokenizer)  # first: it may be out of reach, and the text a long download
            splits = source.splits()
        dtype = token_dtype(encoding.n_vocab)
        manifest = {"fingerprint": _fingerprint(identity, source.about), "identity": identity, "about": source.about}
        manifest |= {"tokenizer": tokenizer_state(encoding), "dtype": dtype.str, "splits": {}}
        for split, stream in splits.items():
            began, counts = time.perf_counter(), Counts()
            pieces = tokenize(stream(), encoding, num_workers, counts)
            if split == "train":
                pieces = _refusing_lossy(pieces, tokenizer, counts)
            shards = write_split(folder, split, dtype, pieces)
            manifest["splits"][split] = asdict(counts) | {"shards": shards}
            megabytes, seconds = counts.bytes / 1e6, time.perf_counter() - began
            lost = f", {counts.unknown:,} tokens unknown" if counts.unknown else ""
            say(f"tokenized {split}: {megabytes:.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s){lost}")
        with open(folder / MANIFEST, "x") as file:
            json.dump(manifest | {"checksum": digest(manifest)}, file, indent=1)
        flush(folder / MANIFEST)


def _refusing_lossy(pieces: Iterator[np.ndarray], tokenizer: str, counts: Counts) -> Iterator[np.ndarray]:
    """Yield the `pieces`; ValueError where too many of the `counts` so far are unknown."""
    for tokens in pieces:
        yield tokens
        if counts.tokens >= LOOKED_AT:
            _refuse_lossy(tokenizer, counts)
    _refuse_lossy(tokenizer, counts)


def _refuse_lossy(tokenizer: str, counts: Counts) -> None:
    if counts.unknown > MOST_UNKNOWN * counts.tokens:
        raise ValueError(
            f"tokenizer={tokenizer} has no token for much of the text: {counts.unknown:,} of {counts.tokens:,} stand "
            "for text that is lost; use another, as bytes or gpt2"
        )


def _alphabet(stream: Stream) -> str:
    characters: set[str] = set()
    for text, _ in stream():
        characters.update(text)
    if not characters:
        raise ValueError("the training split is empty; use a longer text or a smaller data.validation_fraction")
    return "".join(sorted(characters))


@contextmanager
def _written_at_once(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends well, and is removed when it does not."""
    folder = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        yield folder
        flush(folder)
        folder.chmod(0o755)  # mkdtemp's folders are private; a cache may be shared
        try:
            folder.rename(path)
        except OSError:
            if not path.exists():
                raise
        else:
            flush(path.parent)
    except OSError as error:
        # once the folder exists, the block also reads the source; only writing raises these
        if folder and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        refusal = f"data.cache_dir={path.parent} cannot be written ({error.strerror}); use data.cache_dir=FOLDER"
        raise ValueError(refusal) from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    for folder in path.parent.glob(f".{path.name}.*.tmp"):
        with suppress(FileNotFoundError):  # another process has removed it since
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def digest(value: Any) -> str:
    """SHA-256 of a JSON-able value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
