"""The order of the rules, and the reasons that stand beside them."""

from itertools import pairwise

from pseudoreal_operator.lifecycle.rules import RULES

NAMES = [rule.decide.__name__ for rule in RULES]


def test_each_rule_stands_before_the_rules_that_its_reasons_name() -> None:
    for position, rule in enumerate(RULES):
        later = NAMES[position + 1 :]
        assert {other.__name__ for other in rule.before} <= set(later), f"{NAMES[position]} stands before {later}"


def test_each_rule_has_a_reason_to_stand_before_its_neighbour() -> None:
    """So no two neighbours can be exchanged unnoticed."""
    missing = [one.decide.__name__ for one, other in pairwise(RULES) if other.decide not in one.before]
    assert missing == []


def test_each_reason_is_a_clause() -> None:
    reasons = [reason for rule in RULES for reason in rule.before.values()]
    assert [reason for reason in reasons if len(reason.split()) < 5] == []
    assert len(set(NAMES)) == len(NAMES) == 22
