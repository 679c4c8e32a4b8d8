"""Token shards on disk: raw little-endian uint16 or uint32 files, read through one array-like view, and their checks.

A split is a sequence of files `train-00000.bin`, `train-00001.bin`, ... of at most SHARD_TOKENS tokens. Each file's
length and SHA-256 are in the manifest of the set; `verify` compares them at every opening, because a damaged token
would train a wrong model in silence.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

SHARD_TOKENS = 1 << 26  # 128 MiB of uint16: few files, and still several for threads to check at once


class TokenArray:
    """A read-only 1-D array over memory-mapped shards. Slices (step 1) give numpy arrays."""

    def __init__(self, shards: list[np.ndarray], dtype: np.dtype) -> None:
        self.dtype = np.dtype(dtype)
        self._shards = shards
        self._starts = np.cumsum([0] + [len(shard) for shard in shards])  # the last one is the length

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, step = index.indices(len(self))
        assert step == 1, "a token array is read forwards, without gaps"
        parts = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            offset = int(self._starts[shard])
            part = self._shards[shard][start - offset : stop - offset]
            parts.append(part)
            start, shard = start + len(part), shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty(0, self.dtype), *parts])


Tokens = TokenArray | np.ndarray  # a split, as batches read it


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_split(folder: Path, split: str, dtype: np.dtype, pieces: Iterable[np.ndarray]) -> list[dict[str, Any]]:
    """Write the tokens of one split to shards in `folder`; return what the manifest keeps of them."""
    shards: list[dict[str, Any]] = []
    with ExitStack() as written:
        for tokens in pieces:
            while len(tokens):
                if not shards or shards[-1]["tokens"] == SHARD_TOKENS:
                    written.close()
                    shards.append({"file": f"{split}-{len(shards):05d}.bin", "tokens": 0})
                    file = written.enter_context(open(folder / shards[-1]["file"], "xb"))
                    seen = hashlib.sha256()  # of what was meant: a disk may keep something else
                part, tokens = np.split(tokens, [SHARD_TOKENS - shards[-1]["tokens"]])
                raw = part.astype(dtype).tobytes()
                file.write(raw)
                seen.update(raw)
                shards[-1] |= {"tokens": shards[-1]["tokens"] + len(part), "sha256": seen.hexdigest()}
    for shard in shards:
        flush(folder / shard["file"])
    return shards


def open_split(folder: Path, shards: list[dict[str, Any]], dtype: np.dtype) -> TokenArray:
    """Memory-map verified shards."""
    return TokenArray([np.memmap(folder / shard["file"], dtype=dtype, mode="r") for shard in shards], dtype)


def verify(folder: Path, shards: list[dict[str, Any]], dtype: np.dtype) -> None:
    """Compare every shard with the manifest: length first, then SHA-256 (2 GB/s a core; WikiText-103 takes 0.2 s).

    Raises ValueError with the name of the first file that is missing, cut or altered, and the remedy.
    """
    remedy = f"delete {folder} and run again"
    for shard in shards:
        path, expected = folder / shard["file"], shard["tokens"] * dtype.itemsize
        if not path.is_file():
            raise ValueError(f"{path} is missing; {remedy}")
        size = path.stat().st_size
        if size != expected:
            raise ValueError(f"{path} has {size:,} bytes in place of {expected:,}; {remedy}")
    paths = [folder / shard["file"] for shard in shards]
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        for path, shard, digest in zip(paths, shards, pool.map(file_sha256, paths), strict=True):
            if digest != shard["sha256"]:
                raise ValueError(f"{path} was altered (its SHA-256 is not the manifest's); {remedy}")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file to disk, or a folder: the names of files reach the disk only when their folder does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
