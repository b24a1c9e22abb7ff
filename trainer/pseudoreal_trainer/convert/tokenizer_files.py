"""The tokenizer beside exported weights: the byte tokenizer in the format of the `tokenizers` library, or a copy of a
tokenizer.json with the files that belong to it."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from pseudoreal_trainer.data.tokenizer.saved import BESIDE, TOKENIZER_CONFIG
from pseudoreal_trainer.data.tokenizer.token_bytes import BYTE_CHARACTERS, pieces
from pseudoreal_trainer.data.tokenizer.tokenizer import TOKENIZER_FILE, json_object, named_token
from pseudoreal_trainer.errors import InvalidJobError

Source = Path | Literal["bytes"]
"""A tokenizer.json, or the name of the byte tokenizer."""


def write_tokenizer(folder: Path, tokenizer: Source | None) -> None:
    """Write the files of the tokenizer; nothing for None. Raises OSError."""
    if tokenizer is None:
        return
    if tokenizer == "bytes":
        _write(folder / TOKENIZER_FILE, _bytes())
    else:
        shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
        for name in BESIDE:
            if (beside := tokenizer.parent / name).exists():
                shutil.copyfile(beside, folder / name)
    if not (folder / TOKENIZER_CONFIG).exists():
        _write(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})


def special_tokens(tokenizer: Source | None) -> dict[str, int | None]:
    """Return bos_token_id and eos_token_id for config.json, from the files beside tokenizer.json. Without the end
    token, `transformers` would not stop at the end of a text. None: the files name no such token. Raises
    InvalidJobError and OSError."""
    if not isinstance(tokenizer, Path):
        return {"bos_token_id": None, "eos_token_id": None}
    begin, end = named_token(tokenizer.parent, "bos"), named_token(tokenizer.parent, "eos")
    numbers = _numbers(tokenizer)
    return {
        "bos_token_id": numbers.get(begin) if isinstance(begin, str) else begin,
        "eos_token_id": numbers.get(end) if isinstance(end, str) else end,
    }


def _numbers(tokenizer: Path) -> dict[str, int]:
    """Return token text -> number, for all tokens."""
    description = json_object(tokenizer)
    model = description.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise InvalidJobError(f"{tokenizer} is no tokenizer.json; restore the file, or name another one")
    added = {token["content"]: token["id"] for token in description.get("added_tokens") or []}
    return dict(pieces(model)) | added


def _bytes() -> dict[str, Any]:
    """Return a byte-level BPE without merges, in which token b is byte b."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(BYTE_CHARACTERS)},
            "merges": [],
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
