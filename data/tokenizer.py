"""Text to token ids and back: tokenizers with the methods of tiktoken's `Encoding` and an end-of-text token.

    bytes        ids 0..255 are UTF-8 bytes, 256 is end-of-text; nothing to download
    characters   ids are the code points of the training split, sorted, then end-of-text (char-rnn, nanoGPT)
    gpt2         GPT-2's 50,257 tokens; tiktoken downloads two files once
    a folder     the tokenizer.json in it, of any model of transformers (data/tokenizer_file.py)
    OWNER/NAME   the same, from the Hugging Face hub

Decoding can meet tokens that are not valid UTF-8 (a model may produce any byte): `decode` replaces what is invalid,
`decode_bytes` returns the bytes themselves, so that a stream can wait for the rest of a character.
"""

import hashlib
from typing import Any

import numpy as np
import tiktoken

from data.config import TOKENIZERS, check_tokenizer

END_OF_TEXT = "<|endoftext|>"


class CharacterEncoding(tiktoken.Encoding):
    """One id for each character of an alphabet.

    `encode_ordinary` and `encode_to_numpy` raise a ValueError that names any other character.
    """

    def __init__(self, alphabet: str) -> None:
        super().__init__(
            "characters",
            pat_str=r"(?s:.)",  # each piece is one character, newlines too, so no merge is ever looked for
            mergeable_ranks={character.encode(): i for i, character in enumerate(alphabet)},
            special_tokens={END_OF_TEXT: len(alphabet)},
        )
        self.alphabet = alphabet
        self._known = frozenset(alphabet)

    def encode_ordinary(self, text: str) -> list[int]:
        self._refuse_unknown(text)
        return super().encode_ordinary(text)

    def encode_to_numpy(self, text: str, **options: Any) -> np.ndarray:
        self._refuse_unknown(text)
        return super().encode_to_numpy(text, **options)

    def _refuse_unknown(self, text: str) -> None:
        # tiktoken itself would panic in Rust, which no `except` of a caller expects
        unknown = set(text) - self._known
        if unknown:
            character = min(unknown)
            raise ValueError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {len(self.alphabet)} characters of "
                "the training split; leave it out, or train with tokenizer=bytes"
            )


def build_tokenizer(name: str, alphabet: str = "") -> tiktoken.Encoding:
    """The tokenizer called `name`; `alphabet` (distinct characters in order) is needed by `characters`; for a
    folder it is what `read_tokenizer` returned.

    Raises ValueError for an unknown name, and where GPT-2's files are neither cached nor within reach.
    """
    if not alphabet or name in TOKENIZERS:  # a stored tokenizer needs no folder, which may be gone
        check_tokenizer(name)
    if name not in TOKENIZERS:
        from data.tokenizer_file import FileEncoding, read_tokenizer

        return FileEncoding(name, alphabet or read_tokenizer(name))
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            # any cut is right, as nothing merges, and long runs encode faster than single characters
            pat_str=r"(?s:.){1,64}",
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if name == "characters":
        if not alphabet:  # from a checkpoint or a manifest that this program did not write
            raise ValueError("tokenizer=characters without an alphabet, which the training split gives; use another")
        return CharacterEncoding(alphabet)
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # what requests raises for every kind of network failure
        raise ValueError(
            "tokenizer=gpt2 needs GPT-2's vocabulary, which could not be downloaded "
            f"({type(error).__name__}); give TIKTOKEN_CACHE_DIR a folder that holds it, or train with tokenizer=bytes"
        ) from error


def tokenizer_label(name: str) -> str:
    """How a cache names the tokenizer `name`: a folder's by the contents of its files, wherever it lies.

    Changes of the code that altered tokens are hashed too, so that tokens of earlier releases are not used.
    """
    if name in TOKENIZERS:
        return name
    from data.tokenizer_file import read_tokenizer

    contents = read_tokenizer(name)
    if "▁" in contents:  # there used to be a blank before each piece of a long text
        contents += "one blank a document"
    contents += "pieces change no token"  # a cut between pieces used to change some
    return f"file-{hashlib.sha256(contents.encode()).hexdigest()[:16]}"


def tokenizer_state(encoding: tiktoken.Encoding) -> dict[str, str]:
    """What a checkpoint or a manifest stores (JSON) so that `tokenizer_from_state` needs no data."""
    return {"name": encoding.name, "alphabet": getattr(encoding, "alphabet", "")}


def tokenizer_from_state(state: dict[str, str]) -> tiktoken.Encoding:
    return build_tokenizer(state["name"], state["alphabet"])
