"""WikiText: its own files, and its articles.

The text is used as published (Merity et al. 2016, arXiv:1609.07843), with the marks of its tokenization: hyphens,
commas and points inside words and numbers as ` @-@ `, ` @,@ ` and ` @.@ `, punctuation set off by blanks, headings as
` = Title = `, and in the versions that are not raw `<unk>` for rare words. Undoing that would make losses incomparable
with everybody else's.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.tokenize import Fragment

_TITLE = re.compile(r" = [^=].*[^=] = \n?")

# the first of these names that exists is read; "head" files are beginnings of a train split
_FILES = {
    "train": ("train.txt", "wiki.train.raw", "wiki.train.tokens", "wiki.train.head.raw", "wiki.train.head.tokens"),
    "validation": ("valid.txt", "validation.txt", "wiki.valid.raw", "wiki.valid.tokens"),
}


def find(folder: Path) -> dict[str, Path]:
    """WikiText's own files in `folder`: train and validation; {} where none is."""
    there = {split: [folder / name for name in names if (folder / name).is_file()] for split, names in _FILES.items()}
    for split, paths in there.items():
        if not paths and any(there.values()):
            raise ValueError(f"data.local_dir={folder} has no {split} split; add one of {', '.join(_FILES[split])}")
    return {split: paths[0] for split, paths in there.items() if paths}


def articles(lines: Iterable[str]) -> Iterator[Fragment]:
    """Lines (with line ends; blank ones may lack theirs, as on the hub) as articles.

    An article begins at a title with a blank line before and after it. A few headings inside articles look like titles
    but have no blank line around them; with this rule the splits have the published 600, 60 and 60 articles. The joined
    articles are the joined lines of WikiText's own files.
    """
    article: list[str] = []
    before, candidate = True, False  # was the last line blank; was it a title with a blank line before it
    for line in lines:
        blank = not line.strip()
        if candidate and blank:
            *done, title = article
            if any(map(str.strip, done)):
                yield "".join(done), True
                article = [title]
        candidate = before and _TITLE.fullmatch(line) is not None
        before = blank
        article.append(line or " \n")
    if article:
        yield "".join(article), True
