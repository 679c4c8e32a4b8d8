"""WikiText: its files, the Hugging Face hub that has them too, and its articles.

The text is taken as published (Merity et al. 2016, arXiv:1609.07843), with the marks of its tokenization: hyphens,
commas and points inside words and numbers as ` @-@ `, ` @,@ ` and ` @.@ `, punctuation set off by blanks, headings as
` = Title = `, and in the versions that are not raw `<unk>` for rare words. Undoing that would make losses incomparable
with everybody else's.

Published word counts (2,088,628 for WikiText-2's train split) count each line's end as a word; ours do not.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data.tokenize import Fragment

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # fixed, so that a name means the same text next year
_ROWS = {"wikitext-2": (36_718, 3_760, 4_358), "wikitext-103": (1_801_350, 3_760, 4_358)}  # train, validation, test
_PATIENCE_SECONDS = 5.0  # for the one small question that decides whether the hub is within reach
_TITLE = re.compile(r" = [^=].*[^=] = \n?")

# the first pattern that is there; "head" files are beginnings of a train split
_FILES = {
    "train": ("train.txt", "wiki.train.raw", "wiki.train.tokens", "wiki.train.head.raw", "wiki.train.head.tokens"),
    "validation": ("valid.txt", "validation.txt", "wiki.valid.raw", "wiki.valid.tokens"),
    "test": ("test.txt", "wiki.test.raw", "wiki.test.tokens"),
}


def find(folder: Path) -> dict[str, Path]:
    """WikiText's own files in `folder`: train and validation, and test where it is there."""
    if not folder.is_dir():
        raise ValueError(f"data.local_dir={folder} is not a folder; give a path from {Path.cwd()}")
    found = {}
    for split, names in _FILES.items():
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path:
            found[split] = path
        elif split != "test":
            raise ValueError(f"data.local_dir={folder} has no {split} split; add one of {', '.join(names)}")
    return found


def from_hub(name: str) -> dict[str, Callable[[], Iterator[str]]]:
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


def articles(lines: Iterable[str]) -> Iterator[Fragment]:
    """Lines (with line ends) as articles: one begins at a title with a blank line before and after it.

    A few headings inside articles look like titles but have no blank line around them; with this rule the splits
    have the published 600, 60 and 60 articles. The joined articles are the joined lines.
    """
    article: list[str] = []
    before, candidate = True, False  # was the last line blank; was it a title with a blank line before it
    for line in lines:
        blank = not line.strip()
        if candidate and blank and len(article) > 1:
            *done, title = article
            if any(map(str.strip, done)):
                yield "".join(done), True
                article = [title]
        candidate = before and _TITLE.fullmatch(line) is not None
        before = blank
        article.append(line)
    if article:
        yield "".join(article), True
