"""A tokenizer of Hugging Face's format, a folder's tokenizer.json, with the methods of ours."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATE = "chat_template.jinja"


def _folder(name: str) -> Path:
    """The folder `name`, or a local copy of the hub's OWNER/NAME; ValueError where there is neither."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, HTTPError

        try:
            folder = Path(snapshot_download(name, allow_patterns=[*FILES, TEMPLATE]))
        except (HTTPError, HFValidationError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"tokenizer={name} is no folder and not within reach ({reason}); give a folder with its {FILES[0]}"
            ) from error
    return folder


def read_config(name: str) -> dict[str, Any]:
    """The tokenizer_config.json of `name` and the chat template beside it: an exported model gets both."""
    folder = _folder(name)
    config = json.loads((folder / FILES[1]).read_text(encoding="utf-8"))
    if (folder / TEMPLATE).is_file():
        config["chat_template"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    return config


def read_tokenizer(name: str) -> str:
    """What rebuilds the tokenizer of a folder, or of OWNER/NAME of the hub: JSON with its end-of-text token.

    Raises ValueError where there is none.
    """
    folder, contents = _folder(name), None
    try:
        contents = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
        config = json.loads((folder / FILES[1]).read_text(encoding="utf-8"))
        end_of_text = config.get("eos_token")
        end_of_text = end_of_text["content"] if isinstance(end_of_text, dict) else end_of_text
        if not isinstance(end_of_text, str):
            raise ValueError(f"eos_token is {end_of_text!r}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = Path(error.filename).name + " is not there" if isinstance(error, FileNotFoundError) else error
        remedy = "use one of ours, as tokenizer=gpt2"
        if contents is not None and folder == Path(name):  # the library tokenizers saves the first file alone
            remedy = f'name one of its tokens as {{"eos_token": "TOKEN"}} in {folder / FILES[1]}, or {remedy}'
        raise ValueError(
            f"tokenizer={name} has no {' and '.join(FILES)} with an eos_token ({reason}); {remedy}"
        ) from error
    return json.dumps({"end_of_text": end_of_text, "tokenizer": contents}, ensure_ascii=False, sort_keys=True)


class FileEncoding:
    """A tokenizer from files: `name` is the folder or OWNER/NAME, `alphabet` what `read_tokenizer` returned."""

    def __init__(self, name: str, alphabet: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError as error:
            raise ValueError(f"tokenizer={name} needs the package tokenizers; uv run --group hf brings it") from error

        from data.tokenizer_json import LETTERS

        self.name, self.alphabet = name, alphabet
        try:
            state = json.loads(alphabet)
            end_of_text = state["end_of_text"]
            self._inner = Tokenizer.from_str(json.dumps(state["tokenizer"]))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer={name} has a {FILES[0]} of another format ({error}); use another") from error
        self._inner.encode_special_tokens = True  # special tokens in a text are text
        self._inner.no_padding()
        self._inner.no_truncation()
        self.n_vocab = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self.eot_token = self._inner.token_to_id(end_of_text)
        if self.eot_token is None:
            raise ValueError(f"tokenizer={name} has no token {end_of_text!r}, its eos_token; use another")
        self._bytes = {letter: byte for byte, letter in LETTERS.items()}
        decoder = json.dumps(state["tokenizer"].get("decoder"))
        self._of_bytes, self._falls_back = '"ByteLevel"' in decoder, '"ByteFallback"' in decoder
        self._end = self._inner.decode([self.eot_token], skip_special_tokens=False)
        model = state["tokenizer"].get("model", {})
        unknown = model.get("unk_id") if model.get("unk_token") is None else self._inner.token_to_id(model["unk_token"])
        self.unk_token = None if model.get("byte_fallback") else unknown  # what stands for text that has no token
        self.unknown = None if self.unk_token is None else self._inner.id_to_token(self.unk_token)  # its spelling
        self._line: list[int] = []  # tokens of a newline after the blank that is put before any text; empty if none is
        with suppress(ValueError):  # an alphabet without newlines
            line = self.encode_ordinary("\n")
            if len(line) > 1 and self._inner.id_to_token(line[0]) == "▁":
                self._line = line

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            return self._inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises nothing narrower: a word without a token
            raise ValueError(f"tokenizer={self.name} cannot encode the text ({error}); use another") from error

    def encode_to_numpy(self, text: str, *, first: bool = True, **_: Any) -> np.ndarray:
        """first: whether a document begins here. Elsewhere there is no leading blank, which SentencePiece tokenizers
        put before any text.
        """
        if self._line and not first:
            behind = self.encode_ordinary("\n" + text)
            if behind[: len(self._line)] == self._line:
                return np.array(behind[len(self._line) :], dtype=np.uint32)
        return np.array(self.encode_ordinary(text), dtype=np.uint32)

    def divides(self, left: str, right: str) -> bool:
        """Whether a text that continues from `left` to `right` has the same tokens if it is cut between them."""
        whole, *parts = (self.encode_to_numpy(text, first=False) for text in (left + right, left, right))
        return np.array_equal(whole, np.concatenate(parts))

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Each token by itself, as a stream needs it: parts of characters are bytes, blanks before words are kept."""
        return b"".join(map(self._piece, tokens))

    def decode(self, tokens: list[int]) -> str:
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        piece = self._inner.id_to_token(int(token)) or ""
        if self._falls_back and (byte := re.fullmatch("<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(byte[1])
        if not self._of_bytes and token == self.eot_token:
            return self._end.encode()
        if not self._of_bytes:  # after another token: the decoder drops a blank at the beginning of a text
            text = self._inner.decode([self.eot_token, int(token)], skip_special_tokens=False)
            return text.removeprefix(self._end).encode()
        if all(letter in self._bytes for letter in piece):
            return bytes(self._bytes[letter] for letter in piece)
        return piece.encode()  # an added token, which is text
