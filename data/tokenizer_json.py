"""Our tokenizers as tokenizer.json, the format of Hugging Face's `tokenizers`, with the same ids.

tiktoken has no list of merges: it merges the two neighbours whose union has the lowest rank. The other library
needs the two parts from which each token was merged: they are what is left of the token's bytes when all tokens of
lower rank have been merged (Sennrich et al., arXiv:1508.07909, run on the token itself).
"""

from itertools import pairwise
from typing import Any

import tiktoken

from data.tokenizer import END_OF_TEXT, CharacterEncoding

# GPT-2 writes a byte as a visible character: bytes without one get those after U+00FF, in order
_SEEN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
LETTERS = {byte: chr(byte) for byte in _SEEN} | {byte: chr(256 + n) for n, byte in enumerate(_UNSEEN)}


def tokenizer_json(encoding: tiktoken.Encoding) -> dict[str, Any]:
    """The contents of tokenizer.json for one of our three tokenizers, or for another that cuts text as GPT-2 does.

    As everywhere in that library, a text that holds <|endoftext|> is split at it. With `characters`, encoding a
    character outside the alphabet is an error there as well.
    """
    tokens = {encoding.decode_single_token_bytes(id): id for id in range(encoding.eot_token)}
    if isinstance(encoding, CharacterEncoding):
        vocabulary = {token.decode(): id for token, id in tokens.items()}
        model = {"type": "WordLevel", "unk_token": "<unk>"}  # not a token: an unknown character is an error
        cut = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        decoder = {"type": "Fuse"}
    else:
        vocabulary = {_letters(token): id for token, id in tokens.items()}
        merges = [f"{_letters(a)} {_letters(b)}" for a, b in merges_of(tokens)]
        model = {"type": "BPE", "merges": merges}
        model |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
        # its regular expression is GPT-2's
        cut = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": encoding.name != "bytes"}
        decoder = cut = cut | {"trim_offsets": True}
    special = {"id": encoding.eot_token, "content": END_OF_TEXT, "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": decoder,
        "model": model | {"vocab": vocabulary | {END_OF_TEXT: encoding.eot_token}},
    }


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """For each token of several bytes the two tokens it is merged from, by rank."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            unions = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            first = unions.index(min(unions))
            assert unions[first] < ranks[token], f"{token} is no union of tokens before it"
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _letters(token: bytes) -> str:
    return "".join(LETTERS[byte] for byte in token)
