"""WikiText from the Hugging Face hub, or from the hub's cache on this machine."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # fixed, so that a name means the same text next year
_ROWS = {"wikitext-2": (36_718, 3_760, 4_358), "wikitext-103": (1_801_350, 3_760, 4_358)}  # train, validation, test
_PATIENCE_SECONDS = 5.0  # for the one small question that decides whether the hub is within reach


def load(name: str) -> dict[str, Callable[[], Iterator[str]]]:
    """Opens each split as lines with line ends, as in WikiText's own files.

    Raises ValueError, one line that names the ways out, where neither the hub nor its cache has the text.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # base of all that its HTTP client raises

    offline = datasets.config.HF_HUB_OFFLINE
    try:
        # without a network `datasets` retries for 23 s before it looks into its cache; offline it looks at once
        datasets.config.HF_HUB_OFFLINE = offline or not within_reach()
        loaded = datasets.load_dataset(REPOSITORY, name, revision=REVISION)
    except (OSError, HTTPError, DatasetsError) as error:
        raise ValueError(
            f"{name} cannot be had from the Hugging Face hub ({type(error).__name__}); without a network use "
            "data.local_dir=FOLDER with WikiText's files, data=text data.files=FILE, or a filled HF_HOME"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    splits = {split: loaded[split] for split in ("train", "validation", "test")}
    rows, expected = tuple(map(len, splits.values())), _ROWS[name.split("-")[0] + "-" + name.split("-")[1]]
    if rows != expected:  # a cache filled from another revision
        raise ValueError(f"{name} has {rows} rows in place of {expected}; empty its folder under HF_HOME and run again")
    return {split: partial(_lines, table) for split, table in splits.items()}


def within_reach() -> bool:
    """Does the hub answer?"""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        HfApi().dataset_info(REPOSITORY, revision=REVISION, timeout=_PATIENCE_SECONDS)
    except (OSError, HTTPError):
        return False
    return True


def _lines(table: Any) -> Iterator[str]:
    for batch in table.with_format("arrow").iter(8192):
        # the hub stores blank lines as "", the original files as " \n"
        yield from (line or " \n" for line in batch["text"].to_pylist())
