"""Which tokens begin and end a text, from the files beside `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any, Literal

from pseudoreal_trainer.errors import InvalidJobError


def named_token(folder: Path, kind: Literal["bos", "eos"]) -> str | int | None:
    """The token that begins or ends a text, by its text or its number: what `tokenizer_config.json` says, else
    `config.json`.

    Models that chat have several ends in `config.json`; the first is that of pre-training. Raises InvalidJobError where
    a file is damaged.
    """
    token = json_object(folder / "tokenizer_config.json").get(f"{kind}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return text
    numbers = json_object(folder / "config.json").get(f"{kind}_token_id")
    first = numbers[0] if isinstance(numbers, list) and numbers else numbers
    return first if isinstance(first, int) else None


def json_object(path: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none. Raises InvalidJobError where it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InvalidJobError(f"{path} is not JSON ({error}); restore the file") from error
    if not isinstance(found, dict):
        raise InvalidJobError(f"{path} is JSON, but no object; restore the file")
    return found
