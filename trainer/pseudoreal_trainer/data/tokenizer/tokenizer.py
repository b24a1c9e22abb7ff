"""Text to tokens and back, by bytes or by the `tokenizer.json` of the `tokenizers` library."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokenizer.token_bytes import TokenBytes, token_bytes
from pseudoreal_trainer.errors import InvalidJobError, from_extra

Tokens = NDArray[np.uint32]

TOKENIZER_FILE = "tokenizer.json"
BYTES = "bytes"
"""Name of the tokenizer with bytes as tokens."""


class Tokenizer(Protocol):
    """Conversion between text and tokens, numbers 0..vocabulary-1. Special strings in a text are encoded as plain text:
    a web page must not be able to forge the end of a document."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def end_of_document(self) -> int:
        """The token that ends documents. Raises InvalidJobError if no file and no option names it."""

    @property
    def sha256(self) -> str:
        """SHA-256 that identifies the tokenizer, in hexadecimal: of tokenizer.json, or of all 256 byte values."""

    @property
    def token_bytes(self) -> TokenBytes: ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of the text, [n], without start or end tokens."""

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Return text for people; invalid UTF-8 becomes replacement characters."""


def load_tokenizer(path: str | Path, end_of_document: int | None = None) -> Tokenizer:
    """Return the tokenizer at `path`: a file, a folder, or BYTES. Raises InvalidJobError if it cannot be used.

    `end_of_document`: the token that ends documents; None for the token named by the files beside `tokenizer.json`. Not
    all uses need this token, so a missing token is an error only when `Tokenizer.end_of_document` is read.
    """
    if str(path) == BYTES:
        return ByteTokenizer(_checked(0 if end_of_document is None else end_of_document, 256))
    path = Path(path)
    return FileTokenizer(path / TOKENIZER_FILE if path.is_dir() else path, end_of_document)


class ByteTokenizer:
    """256 tokens, the bytes of UTF-8. No byte is reserved as the end of a document; the default is NUL, which text does
    not contain."""

    vocabulary = 256

    def __init__(self, end_of_document: int = 0) -> None:
        self.end_of_document = end_of_document
        self.sha256 = hashlib.sha256(bytes(range(256))).hexdigest()

    @cached_property
    def token_bytes(self) -> TokenBytes:
        table = np.ones(256, dtype=np.int64)
        table[self.end_of_document] = 0
        return table

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        return bytes(int(token) for token in tokens).decode(errors="replace")


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`."""

    def __init__(self, file: Path, end_of_document: int | None = None) -> None:
        with from_extra("data"):
            import tokenizers
        content = _read(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            self._description: dict[str, Any] = json.loads(content)
        except Exception as error:  # the library raises Exception itself
            raise InvalidJobError(f"{file} is no tokenizer.json ({error}); restore the file") from error
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        # `encode_special_tokens` is not stored in the file; published files have truncation and padding set for
        # training other models.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._file = file
        self._end = named_token(file.parent, "eos") if end_of_document is None else end_of_document

    @cached_property
    def end_of_document(self) -> int:
        number = self._number(self._end)
        if number is not None:
            return _checked(number, self.vocabulary)
        special = {token["id"]: token["content"] for token in self._description.get("added_tokens") or []}
        listed = ", ".join(f"{number} {text}" for number, text in sorted(special.items())[:10]) or "none"
        file, named = self._file, self._end
        said = f"no file beside {file} says" if named is None else f"{file} lacks the token {named!r}"
        raise InvalidJobError(
            f"{said} which token ends a document: give its number, by --end-of-document or"
            f" spec.data.documents.endToken; the special tokens are {listed}"
        )

    @cached_property
    def token_bytes(self) -> TokenBytes:
        table = token_bytes(self._description, self.vocabulary)
        if self._number(self._end) is not None:
            table[self.end_of_document] = 0
        return table

    def _number(self, token: str | int | None) -> int | None:
        """Return the number of a token given by its text or its number; None if the tokenizer lacks it."""
        found: int | None = self._tokenizer.token_to_id(token) if isinstance(token, str) else token
        return found

    def encode(self, text: str) -> Tokens:
        # encode_batch_fast skips the tokens' offsets in the text: it takes a seventh of the time.
        [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, dtype=np.uint32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        found: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidJobError(
            f"the tokenizer {file} cannot be read ({error.strerror}); give a {TOKENIZER_FILE}, a folder that holds one,"
            f" or {BYTES}"
        ) from error


def _checked(end_of_document: int, vocabulary: int) -> int:
    if not 0 <= end_of_document < vocabulary:
        raise InvalidJobError(
            f"{end_of_document} cannot end documents: the tokenizer has the tokens 0 to {vocabulary - 1}"
        )
    return end_of_document


def named_token(folder: Path, kind: Literal["bos", "eos"]) -> str | int | None:
    """Return the token that starts or ends a text, as text or number: from `tokenizer_config.json`, else from
    `config.json`.

    Chat models list several end tokens in `config.json`; the first is the end token of pre-training. Raises
    InvalidJobError if a file is damaged.
    """
    token = json_object(folder / "tokenizer_config.json").get(f"{kind}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return text
    numbers = json_object(folder / "config.json").get(f"{kind}_token_id")
    first = numbers[0] if isinstance(numbers, list) and numbers else numbers
    return first if isinstance(first, int) else None


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file; empty if the file does not exist. Raises InvalidJobError if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InvalidJobError(f"{path} is not JSON ({error}); restore the file") from error
    if not isinstance(found, dict):
        raise InvalidJobError(f"{path} is JSON, but no object; restore the file")
    return found
