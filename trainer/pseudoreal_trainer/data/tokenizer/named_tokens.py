"""The tokens that start and end a text, from the files beside `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any, Literal

from pseudoreal_trainer.errors import InvalidJobError


def named_token(folder: Path, kind: Literal["bos", "eos"]) -> str | int | None:
    """Return the token that starts or ends a text, as text or number: from `tokenizer_config.json`, else from
    `config.json`.

    Chat models list several end tokens in `config.json`; the first is the one of pre-training. Raises InvalidJobError
    if a file is damaged.
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
