"""The groups and the order of the rules, and the reasons that stand beside them."""

from itertools import pairwise

import pytest
from pseudoreal_operator.lifecycle.rules import RULES, UNLESS_COMPLETE, Rule, Standing

GROUPS = {"unless complete": UNLESS_COMPLETE} | {standing.value: rules for standing, rules in RULES.items()}
LAST = {
    Standing.COMPLETE: "complete_stage",
    Standing.RUNNING: "execution_running",
    Standing.HELD: "execution_running",
    Standing.FAILED: "execution_failed",
    Standing.ABSENT: "start_execution",
}
"""State of the Job -> the rule that always decides."""


def names(rules: tuple[Rule, ...]) -> list[str]:
    return [rule.decide.__name__ for rule in rules]


@pytest.mark.parametrize("group", GROUPS)
def test_each_rule_stands_before_the_rules_that_its_reasons_name(group: str) -> None:
    rules = GROUPS[group]
    for position, rule in enumerate(rules):
        later = names(rules)[position + 1 :]
        assert {other.__name__ for other in rule.before} <= set(later), f"{names(rules)[position]} before {later}"


@pytest.mark.parametrize("group", GROUPS)
def test_each_rule_has_a_reason_to_stand_before_its_neighbour(group: str) -> None:
    """So no two neighbours can be exchanged unnoticed."""
    missing = [one.decide.__name__ for one, other in pairwise(GROUPS[group]) if other.decide not in one.before]
    assert missing == []


def test_each_reason_is_a_clause() -> None:
    reasons = [reason for rules in GROUPS.values() for rule in rules for reason in rule.before.values()]
    assert [reason for reason in reasons if len(reason.split()) < 5] == []


def test_each_state_of_the_job_has_a_rule_that_always_decides() -> None:
    assert {standing: names(rules)[-1] for standing, rules in RULES.items()} == LAST
