"""Any text dataset of the Hugging Face hub, or a folder laid out like one, through `datasets`.

Rows come in the order of the dataset's files, some thousand at a time, so memory does not grow with the dataset. The
hub's files are copied to its cache (HF_HOME) unless data.streaming=true; those of data.local_dir are read in place.
"""

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from data.config import DataConfig
from data.shards import file_sha256
from data.textfiles import Version, readable, refuse_changed, refuse_unlisted

Rows = Callable[[], Iterator[str]]

_PATIENCE_SECONDS = 5.0  # limit of the one small request that decides whether the hub is within reach
_ROWS = 8192  # rows read at a time


def hash_folder(folder: Path) -> tuple[dict[str, str], dict[Path, Version]]:
    """SHA-256 of every file in data.local_dir by its path there, and each one's version before that.

    Hidden files, such as git's, do not belong to the dataset.
    """
    refuse_unlisted(folder)
    with readable(folder):
        paths = sorted(folder.rglob("*"))
    hashes, versions = {}, {}
    for path in paths:
        name = path.relative_to(folder)
        with readable(path):
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                versions[path] = Version.of(path)
                hashes[name.as_posix()] = file_sha256(path)
    return hashes, versions


def open_splits(
    data: DataConfig, folder: Path | None, hashes: Mapping[str, str], versions: Mapping[Path, Version]
) -> tuple[dict[str, Rows], str]:
    """The texts of the rows of each split, in order; and the hub's commit (of a `folder`: a hash by `datasets`).

    hashes, versions: as `hash_folder` found the files of `folder`; a change since is refused at the end of a split.

    Raises ValueError, one line that names the ways out, where neither the hub nor its cache has the dataset; where
    the cache has another revision than data.revision; and for a split or column that the dataset lacks.
    """
    import datasets

    sizes = None  # stays None for streams, which have no slices
    splits = {"train": data.split, "validation": data.validation_split}
    with _one_line(data):
        # without a network `datasets` retries for 23 s before it looks into its cache; offline it looks at once
        offline = datasets.config.HF_HUB_OFFLINE or bool(folder) or not within_reach(data.name, data.revision)
    with _hub(offline):
        with _one_line(data):
            builder = datasets.load_dataset_builder(str(folder or data.name), data.config, revision=data.revision)
            if hasattr(builder.config, "on_mixed_types"):
                builder.config.on_mixed_types = None  # else one number turns every text into quoted JSON
            if re.fullmatch("[0-9a-f]{40}", data.revision or "") and not folder and builder.hash != data.revision:
                raise ValueError(f"the cache in HF_HOME holds commit {builder.hash} in place of {data.revision}")
        if folder:
            found = {path.resolve(): hashes[path.relative_to(folder).as_posix()] for path in versions}
            _refuse_files(data, builder.config.data_files, found)
        with _one_line(data):
            if data.streaming or folder:
                read: Callable[[str], Any] = builder.as_streaming_dataset
            else:
                builder.download_and_prepare()
                read, sizes = builder.as_dataset, builder.info.splits
            tables = {split: read(spec) for split, spec in splits.items() if spec}
    if sizes and data.validation_split:
        _refuse_shared_rows(data, {name: split.num_examples for name, split in sizes.items()})
    return {split: partial(_texts, data, split, table, versions) for split, table in tables.items()}, builder.hash


def _refuse_shared_rows(data: DataConfig, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if held-out slices share rows with those that are trained on. sizes: rows of each split."""
    from datasets import ReadInstruction

    specs = (data.split, data.validation_split)
    for a, b in product(*(ReadInstruction.from_spec(spec).to_absolute(sizes) for spec in specs)):
        if a.splitname == b.splitname and max(a.from_, b.from_) < min(a.to, b.to):
            raise data.trained_on()


def _refuse_files(data: DataConfig, files: Mapping[str, list[str]], hashed: Mapping[Path, str]) -> None:
    """Raise ValueError if `datasets` would read a file that was not hashed, whose tokens would stay in the cache after
    it changes; a file of its own beside a dataset of `save_to_disk`; or a copy of another file.

    files: those of each split, as the folder's README.md names them; a copy from the hub consists of links to files.
    hashed: SHA-256 of each file that was hashed.
    """
    named = "+".join(filter(None, (data.split, data.validation_split)))
    used, first = {part.partition("[")[0].strip() for part in named.split("+")}, {}
    for split, file in [(split, Path(name)) for split, names in files.items() for name in names]:
        if (sha256 := hashed.get(file.resolve())) is None:
            raise ValueError(
                f"{_title(data)} reads {file}, which was not hashed (it is outside, hidden, behind a linked folder or "
                "new), so that a change would not be seen; put it there under a name without a dot, and run again"
            )
        if file.match("cache-*.arrow") and file.with_name("state.json").exists():
            raise ValueError(
                f"{_title(data)} reads {file}, a copy that `datasets` keeps of what was made from its rows; delete it, "
                "or save the dataset again"
            )
        if str(split) in used and file.stat().st_size and (other := first.setdefault(sha256, file)) != file:
            raise ValueError(
                f"{_title(data)} reads one text twice, as {other} and {file}, and what is held out of one may be "
                "trained on in the other; delete one"
            )


def refuse_if_not_cached(data: DataConfig) -> None:
    """The ValueError of `open_splits`, if the cache alone, without the hub, lacks the dataset."""
    import datasets

    with _hub(offline=True), _one_line(data):
        datasets.load_dataset_builder(data.name, data.config, revision=data.revision)


@contextmanager
def _hub(offline: bool) -> Iterator[None]:
    """Inside, `datasets` uses the hub, or if `offline` only its cache."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def within_reach(name: str, revision: str | None) -> bool:
    """Whether the hub answers. That it has no such dataset is an answer, too."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # the latter: base of all that its HTTP client raises

    try:
        HfApi().dataset_info(name, revision=revision, timeout=_PATIENCE_SECONDS)
    except HfHubHTTPError as error:
        return error.response.status_code < 500
    except (OSError, HTTPError):
        return False
    return True


def _texts(data: DataConfig, split: str, table: Any, versions: Mapping[Path, Version]) -> Iterator[str]:
    batches, number = table.with_format("arrow").iter(_ROWS), 0
    while True:
        with _one_line(data, split):
            batch = next(batches, None)
        if batch is None:
            refuse_changed(versions)
            return
        if data.text_field not in batch.column_names:
            raise ValueError(
                f'{_title(data)} has no column "{data.text_field}"; '
                f"choose one of them with data.text_field: {', '.join(batch.column_names)}"
            )
        with _one_line(data, split):
            texts = batch[data.text_field].to_pylist()
        for text in texts:
            number += 1
            if not isinstance(text, str):
                raise ValueError(
                    f'{_title(data)}: row {number} of its {split} split has no text in its column "{data.text_field}" '
                    f"(it is {reprlib.repr(text)}); drop it, or choose another column with data.text_field"
                )
            yield text


def _title(data: DataConfig) -> str:
    if data.local_dir:
        return f"data.local_dir={data.local_dir}"
    return " ".join(filter(None, (data.name, data.config)))


@contextmanager
def _one_line(data: DataConfig, split: str = "") -> Iterator[None]:
    """Turn errors of `datasets` and the hub's client into a ValueError of one line. split: whose rows are read."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError
    from yaml import YAMLError

    # what the libraries raise over damaged files and odd columns, pyarrow's included; the last is of an empty JSON file
    known = OSError, HTTPError, DatasetsError, ValueError, TypeError, LookupError, AttributeError, ImportError
    known += RuntimeError, YAMLError, StopIteration
    try:
        yield
    except known as error:
        reason = " ".join(str(error).split("\n")[:2]).strip().rstrip(".")
        reason = reason or ("a file is empty" if isinstance(error, StopIteration) else type(error).__name__)
        if split and isinstance(error, UnicodeDecodeError):
            remedy = "convert it with iconv, or choose another column with data.text_field"
            raise ValueError(f"{_title(data)}: its {split} split is not UTF-8 ({reason}); {remedy}") from error
        if data.local_dir:
            remedy = "correct the folder, data.config or data.split"
            raise ValueError(f"{_title(data)} cannot be read ({reason}); {remedy}") from error
        raise ValueError(
            f"{_title(data)} cannot be had from the Hugging Face hub ({type(error).__name__}: {reason}); correct "
            "data.name, data.config or data.split, or without a network use data.local_dir=FOLDER with the dataset's "
            "files, data=text data.files=FILE, or a filled HF_HOME"
        ) from error
