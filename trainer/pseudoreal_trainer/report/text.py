"""Untrusted text on a page. Pure."""

import re

MOST_CHARACTERS = 2000
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than tab and line feed, and lone surrogates, which no encoding can write."""
_INVISIBLE = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Characters that hide, join or reorder the text around them."""


def shown(value: object, most: int = MOST_CHARACTERS) -> str:
    """Return `value` as text with a visible sign for each character that cannot be shown, cut after `most`
    characters."""
    text = str(value)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return _INVISIBLE.sub(lambda found: f"U+{ord(found[0]):04X}", _UNPRINTABLE.sub("\ufffd", text))
