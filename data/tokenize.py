"""A stream of text to a stream of tokens: in parallel, in bounded memory, the same tokens as one long call gives.

Text travels as fragments: (text, first), where `first` says that a document begins here. Fragments may be cut anywhere;
`pieces` cuts them anew where the cut changes no token. tiktoken releases the GIL, so threads suffice. Measured on nine
books (19.7 MB, GPT-2): 16 MB/s with one thread, 24 MB/s with two on two cores (the reader needs a part of the second).
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiktoken

Fragment = tuple[str, bool]

PIECE_CHARACTERS = 1 << 18  # large enough that a thread works many ms on one, small enough for a few hundred in memory

# A newline directly before a visible ASCII character. GPT-2's pattern gives the last white space of a run to what
# follows (a blank) or to itself (a newline), so such a newline always is a token boundary on both sides; bytes and
# characters have a boundary everywhere. Other patterns, as Llama 3's, may join it to a full stop before it, so such a
# tokenizer decides at each cut (`divides`).
_SAFE_CUT = re.compile(r"\n(?=[!-~])")
# In some languages few lines begin so, and a whole book would be one piece. The last white space before a visible
# character begins a token of GPT-2, too. These four are white space to every library.
_OTHER_CUT = re.compile(r"[ \t\n\u3000](?=\S)")
_AROUND = 64  # characters on each side of a cut, from which a tokenizer says whether it changes a token
_LONG = 4  # times the size of a piece: a shorter text waits for a cut of the first kind


@dataclass
class Counts:
    """The totals of a stream."""

    tokens: int = 0
    bytes: int = 0  # of the text as UTF-8, without end-of-text
    documents: int = 0
    unknown: int = 0  # tokens that stand for text without a token of its own


def pieces(
    fragments: Iterable[Fragment],
    size: int = PIECE_CHARACTERS,
    divides: Callable[[str, str], bool] = lambda left, right: True,
) -> Iterator[Fragment]:
    """The same text in pieces of at least `size` characters (the last of a document may be shorter), cut safely.

    divides: whether the texts on both sides of a cut have the same tokens apart as joined.
    """
    assert size > 1, "a piece that begins with a newline must not be cut before it"

    def cut_of(pattern: re.Pattern, text: str, begin: int) -> int | None:
        for found in pattern.finditer(text, begin):
            cut = found.start()
            left, right = text[max(0, cut - _AROUND) : cut], text[cut : cut + _AROUND]
            in_a_run = len(left) == _AROUND and left.isspace()  # of blanks, whose tokens depend on where it begins
            if not in_a_run and divides(left, right):
                return cut
        return None

    waiting: list[str] = []
    length, looked, first = 0, 0, True
    for text, begins in fragments:
        if begins and waiting:
            yield "".join(waiting), first
            waiting, length, looked = [], 0, 0
        if begins:
            first = True
        waiting.append(text)
        length += len(text)
        if length < size:
            continue
        joined, begin = "".join(waiting), 0
        while len(joined) - begin >= size:
            cut = cut_of(_SAFE_CUT, joined, max(begin + size, looked) - 1)
            looked = len(joined) if cut is None else 0
            if cut is None and len(joined) - begin >= _LONG * size:
                cut = cut_of(_OTHER_CUT, joined, begin + size - 1)
            if cut is None:
                break
            yield joined[begin:cut], first
            begin, first = cut, False
        waiting, length, looked = [joined[begin:]], len(joined) - begin, max(0, looked - begin)
    if waiting:
        yield "".join(waiting), first


def tokenize(
    fragments: Iterable[Fragment], encoding: tiktoken.Encoding, num_workers: int, counts: Counts
) -> Iterator[np.ndarray]:
    """Token ids (uint32) of the stream, in order, with end-of-text between documents; adds to `counts` as it goes."""
    end_of_text = np.array([encoding.eot_token], dtype=np.uint32)
    unknown = getattr(encoding, "unk_token", None)
    from_files = not isinstance(encoding, tiktoken.Encoding)  # a FileEncoding (data/tokenizer_file.py)

    def encode(text: str, first: bool) -> tuple[bool, np.ndarray, int, int]:
        # special tokens in the text are text. tiktoken's encodings have no `first`: a document begins like any piece
        begins = {"first": first} if from_files else {}
        try:
            tokens = encoding.encode_to_numpy(text, disallowed_special=(), **begins)
        except ValueError as error:  # GPT-2's pattern and a million blanks in a row
            if from_files or encoding.name == "characters":  # which say what to do
                raise
            remedy = "break up its longest runs of blanks, or use tokenizer=bytes"
            raise ValueError(f"tokenizer={encoding.name} fails over a part of the text ({error}); {remedy}") from error
        lost = 0 if unknown is None else int((tokens == unknown).sum())
        if lost:  # an <unk> in the text itself loses nothing
            lost = max(0, lost - text.count(encoding.unknown))
        return first, tokens, len(text.encode()), lost

    cuts = {"divides": encoding.divides} if from_files else {}
    for first, tokens, size, lost in ordered_map(encode, pieces(fragments, **cuts), num_workers):
        if first and counts.documents:
            counts.tokens += 1
            yield end_of_text
        counts.documents += first
        counts.tokens += len(tokens)
        counts.bytes += size
        counts.unknown += lost
        if from_files and unknown != encoding.eot_token and (tokens == encoding.eot_token).any():
            raise ValueError(
                f"tokenizer={encoding.name} reads {encoding.decode([encoding.eot_token])!r} in the text as the end of "
                "a document; take it out of the text, or use another tokenizer"
            )
        yield tokens


def ordered_map(function: Callable[[str, bool], Any], stream: Iterator[Fragment], num_workers: int) -> Iterator[Any]:
    """`function` of each fragment by a pool of threads, results in order, only a few texts in memory at a time."""
    running: deque[Future] = deque()
    pool = ThreadPoolExecutor(num_workers)
    try:
        for fragment in stream:
            running.append(pool.submit(function, *fragment))
            if len(running) > 2 * num_workers:  # enough that no thread waits while the oldest result is written
                yield running.popleft().result()
        for future in running:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def head(fragments: Iterable[Fragment], characters: int) -> Iterator[Fragment]:
    """The first `characters` characters of a stream; the document at the cut is divided."""
    for text, first in fragments:
        if characters <= 0:
            return
        yield text[:characters], first
        characters -= len(text)


def tail(fragments: Iterable[Fragment], characters: int) -> Iterator[Fragment]:
    """The rest of the stream, which `head` leaves."""
    for text, first in fragments:
        if characters < len(text):
            yield text[max(0, characters) :], first
        characters -= len(text)
