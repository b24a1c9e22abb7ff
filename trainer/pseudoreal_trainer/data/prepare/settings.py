"""Options that determine the bytes of the shards, besides the text and the tokenizer."""

import json

import numpy as np
from pseudoreal_api.base import ApiModel
from pydantic import Field

from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer
from pseudoreal_trainer.data.tokens.native import MOST_SHARD_BYTES, token_type

SHARD_BYTES = 256 << 20


class Settings(ApiModel):
    text_field: str = "text"
    shard_bytes: int = Field(SHARD_BYTES, ge=1, le=MOST_SHARD_BYTES // 2)
    """Bytes of tokens at which a shard ends; it includes the document that reaches the limit. A shard is in memory
    until then."""
    sequence: int | None = Field(None, ge=2)
    """Tokens of a row into which documents are packed; None: no packing."""
    most_malformed: int = Field(0, ge=0)
    """Number of malformed documents of a group that may be left out."""

    def identity(self, tokenizer: Tokenizer) -> str:
        """Return, as text, the options that all shards of a folder must have in common."""
        decisive = self.to_dict() | {
            "version": 1,
            "mostMalformed": None,
            "tokenizer": tokenizer.sha256,
            "endOfDocument": tokenizer.end_of_document,
        }
        return json.dumps(decisive, sort_keys=True)

    def shard_tokens(self, tokenizer: Tokenizer) -> int:
        return max(1, self.shard_bytes // np.dtype(token_type(tokenizer.vocabulary)).itemsize)
