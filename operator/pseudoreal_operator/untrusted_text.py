"""Untrusted text, from pods, nodes, admission webhooks and users; it is sanitized where it is read. Pure."""

import re

MOST_CHARACTERS = 2000
_CUT = " … "
_END_SHARE = 0.75
"""Share of the kept characters that are taken from the end: an error usually comes last."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that cannot be shown: control characters other than tab and line feed, which a terminal would obey, and
lone surrogates, which stand for no character."""
_PICTURES = 0x2400
"""Start of the Unicode block "Control Pictures": a sign for each of the ASCII control characters."""


def sanitize(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text` with a visible sign for each character that cannot be shown, and with at most `most` characters:
    a longer text is reduced to its start and its end."""
    return _UNPRINTABLE.sub(_visible_sign, shorten(text, most))


def shorten(text: str, most: int) -> str:
    """Return `text` with at most `most` characters; a longer text loses its middle."""
    if len(text) <= most:
        return text
    end = int((most - len(_CUT)) * _END_SHARE)
    return text[: most - len(_CUT) - end] + _CUT + text[len(text) - end :]


def _visible_sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "␡" if code == 0x7F else "\ufffd"
