"""Documents as tokens, and the limit on malformed documents."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.prepare.formats.records import Ids, Malformed, Text
from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer
from pseudoreal_trainer.data.tokens.native import MOST_SHARD_BYTES, little_endian, token_type
from pseudoreal_trainer.errors import InvalidJobError


@dataclass(frozen=True, slots=True)
class Document:
    tokens: NDArray[np.unsignedinteger]
    """Tokens of the document without the end token, [n]."""
    text_bytes: int


@dataclass(frozen=True)
class Encoder:
    tokenizer: Tokenizer

    def document(self, content: Text | Ids) -> Document:
        """Return the tokenized document. Raises Malformed if the content cannot be used."""
        found = self._of_tokens(content) if isinstance(content, np.ndarray) else self._of_text(content)
        if (found.tokens == self.tokenizer.end_of_document).any():
            raise Malformed(f"it has the token {self.tokenizer.end_of_document} inside, which ends documents")
        self._check_size(len(found.tokens))
        return found

    def _check_size(self, tokens: int) -> None:
        if tokens * self._dtype.itemsize >= MOST_SHARD_BYTES // 2:
            raise Malformed(f"it has {tokens:,} tokens or more, and a shard has no room for them; cut it")

    def _of_text(self, text: Text) -> Document:
        parts, size, tokens = [], 0, 0
        for piece in text:
            try:
                size += len(piece.encode())
            except UnicodeEncodeError as error:
                raise Malformed(f"it is no Unicode ({error.reason})") from error
            parts.append(self.tokenizer.encode(piece).astype(self._dtype))
            tokens += len(parts[-1])
            self._check_size(tokens)  # checked after each piece: the text may be endless
        return Document(np.concatenate(parts) if len(parts) > 1 else parts[0], size)

    def _of_tokens(self, tokens: Ids) -> Document:
        if len(tokens) and tokens[-1] == self.tokenizer.end_of_document:
            tokens = tokens[:-1]
        if len(outside := tokens[(tokens < 0) | (tokens >= self.tokenizer.vocabulary)]):
            raise Malformed(f"it has the token {outside[0]}, and the tokenizer those below {self.tokenizer.vocabulary}")
        return Document(tokens.astype(self._dtype), int(self.tokenizer.token_bytes[tokens].sum()))

    @property
    def _dtype(self) -> np.dtype[np.unsignedinteger]:
        return little_endian(token_type(self.tokenizer.vocabulary))


class Faults:
    """Counter of malformed documents, which are left out, with a limit."""

    def __init__(self, most: int, count: int = 0) -> None:
        self.most, self.count = most, count

    def add(self, where: str, error: Malformed) -> None:
        """Count a malformed document. Raises InvalidJobError if there are more than allowed."""
        self.count += 1
        if self.count > self.most:
            others = f" after {self.most:,} others that are malformed" if self.most else ""
            raise InvalidJobError(
                f"{where} cannot be used{others}: {error}; mend the file, or allow more with --most-malformed"
            ) from error
