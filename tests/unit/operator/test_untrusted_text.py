"""Untrusted text, sanitized for display."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_operator.untrusted_text import sanitize


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GLHF! 🏖️", "GLHF! 🏖️"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\r\x00\x7f", "␛[31mred␍␀␡"),
        ("\x85\ud83c", "\ufffd\ufffd"),
        ("\u200f\u2028!! &a", "\u200f\u2028!! &a"),
    ],
)
def test_unprintable_characters_are_replaced_visibly(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_long_text_keeps_its_start_and_its_end() -> None:
    shown = sanitize("begin " + "x" * 2**20 + " ValueError: the end", 200)
    assert len(shown) == 200
    assert shown.startswith("begin ")
    assert " … " in shown
    assert shown.endswith(" ValueError: the end")


@given(st.text(st.characters(exclude_categories=[]), max_size=300), st.integers(10, 100))
def test_sanitized_text_is_short_printable_and_stable(text: str, most: int) -> None:
    shown = sanitize(text, most)
    assert len(shown) <= most
    shown.encode()
    assert all(c in "\t\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in shown)
    assert sanitize(shown, most) == shown
