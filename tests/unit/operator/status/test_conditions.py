"""Conditions that the API server accepts, whatever texts they contain."""

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_operator.status.conditions import NewCondition, merge_conditions

REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
"""Pattern of the reason of a metav1.Condition."""


def reason_of(said: str) -> str:
    new = NewCondition("Progressing", "False", said, "It waits.")
    (condition,) = merge_conditions([], [new], 1, datetime(2030, 1, 1, tzinfo=UTC))
    return condition.reason


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("Unschedulable", "Unschedulable"),
        ("Err:image,pull_1", "Err:image,pull_1"),
        ("No\nword 🏖️", "Noword"),
        ("12 monkeys:", "monkeys"),
        ("", "Other"),
        ("🏖️", "Other"),
    ],
)
def test_reason_is_reduced_to_one_word(said: str, word: str) -> None:
    assert reason_of(said) == word


@given(st.text(max_size=300))
def test_every_reason_is_valid_for_the_api_server(said: str) -> None:
    assert REASON.fullmatch(reason_of(said))
