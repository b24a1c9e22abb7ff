"""Requested changes of a job become patches; requests without effect are rejected."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pseudoreal.changes import Change, finish_phase, repeat_phase, resume, suspend
from pseudoreal.errors import NoEffect, NotFound
from pseudoreal.observed_job import ObservedJob

from tests.unit.client.support.observed_jobs import TRAINING, at, job

Json = dict[str, Any]

OVER = TRAINING | {"state": "Complete", "completionTime": at(1), "currentPhase": None}
EVERY: dict[str, Callable[[ObservedJob], Change]] = {
    "suspend": suspend,
    "resume": resume,
    "finish-phase": partial(finish_phase, phase=None),
    "repeat-phase": partial(repeat_phase, phase="pseudo"),
}


def asked(kind: str, phase: str, id: str = "mine") -> list[Json]:
    return [{"id": id, "type": kind, "phase": phase}]


def test_patch_has_the_resource_version_that_was_read() -> None:
    seen = job(TRAINING)
    change = suspend(seen)
    assert change.patch(seen) == {"metadata": {"resourceVersion": "7"}, "spec": {"suspend": True}}
    assert resume(job(TRAINING, spec__suspend=True)).spec == {"suspend": False}
    assert "checkpoint real-14" in resume(job(TRAINING, spec__suspend=True)).effect


@pytest.mark.parametrize("name", EVERY)
def test_changes_of_an_ended_job_are_errors(name: str) -> None:
    with pytest.raises(NoEffect, match=r"llm has ended \(Complete\).*continueFrom"):
        EVERY[name](job(OVER))


def test_suspending_a_suspended_job_and_resuming_a_running_one_are_errors() -> None:
    with pytest.raises(NoEffect, match="suspended already"):
        suspend(job(TRAINING, spec__suspend=True))
    with pytest.raises(NoEffect, match="not suspended; its state is Training"):
        resume(job(TRAINING))


def test_finish_phase_without_a_name_ends_the_current_phase() -> None:
    change = finish_phase(job(TRAINING), None)
    assert change.spec == {"requests": asked("FinishPhase", "real", "finish-real-1")}
    assert (
        change.effect
        == "phase real of llm ends at its next step, through a committed checkpoint (request finish-real-1)"
    )


def test_finish_phase_of_a_later_phase_waits_until_it_trains() -> None:
    first = TRAINING | {"currentPhase": "pseudo", "phases": [{"name": "pseudo", "state": "Training"}]}
    assert "will end as soon as it trains" in finish_phase(job(first), "real").effect
    waiting = finish_phase(job(TRAINING | {"state": "Suspended"}, spec__suspend=True), "real")
    assert waiting.effect.endswith("it is suspended, so this waits until it is resumed")


def test_new_request_has_an_unused_id_and_keeps_earlier_requests() -> None:
    known = asked("FinishPhase", "real", "finish-real-1")
    served = TRAINING | {"servedRequests": ["finish-real-1", "finish-real-2"]}
    change = finish_phase(job(served, spec__requests=known), "real")
    assert change.spec["requests"] == known + asked("FinishPhase", "real", "finish-real-3")


def test_a_second_open_request_for_the_same_phase_is_an_error() -> None:
    for request, kind in ((finish_phase, "FinishPhase"), (repeat_phase, "RepeatPhase")):
        with pytest.raises(NoEffect, match="request mine asks that of phase real already"):
            request(job(TRAINING, spec__requests=asked(kind, "real")), "real")
    # An open request of the other kind does not conflict.
    assert repeat_phase(job(TRAINING, spec__requests=asked("FinishPhase", "real")), "real")


def test_requests_for_unknown_complete_or_pending_phases_are_errors() -> None:
    with pytest.raises(NotFound, match="no phase fake; its phases are pseudo, real"):
        finish_phase(job(TRAINING), "fake")
    with pytest.raises(NoEffect, match="pseudo of llm is complete; pseudoreal repeat-phase llm pseudo -n team"):
        finish_phase(job(TRAINING), "pseudo")
    with pytest.raises(NoEffect, match="no phase of llm trains; name one of pseudo, real"):
        finish_phase(job(), None)
    delinking = TRAINING | {"phases": [TRAINING["phases"][0], {"name": "real", "state": "Delinking"}]}
    for seen in (job(), job(delinking)):
        with pytest.raises(NoEffect, match="real of llm has not begun"):
            repeat_phase(seen, "real")


def test_repeat_phase_names_the_later_phases() -> None:
    change = repeat_phase(job(TRAINING), "pseudo")
    assert change.spec == {"requests": asked("RepeatPhase", "pseudo", "repeat-pseudo-1")}
    assert "again from random weights, and real after it" in change.effect
    assert "again from checkpoint real-10 (request" in repeat_phase(job(TRAINING), "real").effect


def test_served_requests_are_dropped_from_a_full_list() -> None:
    many = [request for number in range(100) for request in asked("FinishPhase", "pseudo", f"r{number}")]
    served = TRAINING | {"servedRequests": [f"r{number}" for number in range(98)]}
    change = finish_phase(job(served, spec__requests=many), "real")
    assert [request["id"] for request in change.spec["requests"]] == ["r98", "r99", "finish-real-1"]
    with pytest.raises(NoEffect, match="100 open requests"):
        finish_phase(job(TRAINING, spec__requests=many), "real")
