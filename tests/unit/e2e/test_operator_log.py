"""When a cluster test can stop waiting because of repeated errors in the operator's log."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.e2e.operator_log import complaints, repeated

BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
SAID: dict[str, Any] = {"event": "pass_failed", "error": "error decoding YAML", "job": "default/killed"}


def log(*moments: float, level: str = "warning", **says: Any) -> str:
    lines = [(SAID | says | {"level": level, "timestamp": (BEGIN + timedelta(seconds=m)).isoformat()}) for m in moments]
    return "\n".join(map(json.dumps, lines)) + "\n"


def judged(text: str) -> str | None:
    return repeated(complaints(text))


def test_an_error_that_is_repeated_for_two_minutes_is_told() -> None:
    assert judged(log(0, 1, 3, 7, 15, 30, 60, 119)) is None
    said = judged(log(0, 1, 3, 7, 15, 30, 60, 120))
    assert said is not None
    assert "pass_failed of default/killed" in said
    assert "error decoding YAML" in said


def test_different_errors_are_not_one() -> None:
    assert judged(log(0, 60, 110) + log(120, error="another")) is None
    assert judged(log(0, 60, 110) + log(120, job="default/other")) is None


def test_what_has_passed_is_not_told() -> None:
    assert judged(log(0, 60, 120) + log(220, event="lease_renewal_failed")) is None
    assert judged(log(0, 100, 200)) is None, "the errors are too far apart"


def test_only_complaints_count() -> None:
    assert judged(log(0, 60, 120, level="info")) is None
    assert complaints("no json\n{cut\n" + log(0, level="error")) == complaints(log(0, level="error"))
    assert repeated([]) is None
