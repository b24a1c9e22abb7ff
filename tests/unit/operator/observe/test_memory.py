"""Memory of jobs and children: its bounds, and when it is known to be behind."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_operator.cluster.api import _SILENT_SECONDS, REQUEST_SECONDS
from pseudoreal_operator.observe.fetch import MEMORY_BEHIND
from pseudoreal_operator.observe.memory import CONFIRM_SECONDS, KINDS, MOST_KEPT_BYTES, Json, Memory

NAME = ("team", "a")


def make_job(name: tuple[str, str] = NAME, version: int = 1, text: str = "", **status: Any) -> Json:
    metadata = {"namespace": name[0], "name": name[1], "uid": f"uid-{name[1]}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": {"text": text}, "status": status}


def listed_memory(clock: Callable[[], float] = lambda: 0.0) -> Memory:
    """Return a memory of watches that are connected and have listed no children."""
    memory = Memory(clock)
    for kind in KINDS:
        watched = memory.watch(kind, None)
        watched.list_again().finish("5")
        watched.connected()
    memory.jobs_missed()
    memory.jobs_listed(None)
    return memory


def test_a_silent_watch_is_cut_before_the_memory_is_behind_by_more_than_bounds_of_times_allow() -> None:
    assert MEMORY_BEHIND.total_seconds() > _SILENT_SECONDS + REQUEST_SECONDS


def test_jobs_in_memory_are_not_used_while_nothing_watches_jobs() -> None:
    memory = listed_memory()
    memory.keep_job(make_job())
    memory.jobs_unwatched()
    assert memory.job(NAME) is None
    memory.jobs_listed(None)
    assert memory.job(NAME) is None, "a list that ends while nothing watches"
    memory.jobs_missed()
    assert memory.job(NAME) is None
    memory.jobs_listed(None)
    assert memory.job(NAME) is not None


def test_neither_a_told_version_nor_a_write_counts_as_a_reading() -> None:
    seconds = [0.0]
    memory = listed_memory(lambda: seconds[0])
    memory.keep_job(make_job())
    seconds[0] = CONFIRM_SECONDS + 1
    memory.job_changed("MODIFIED", make_job(version=2))
    memory.keep_job(make_job(version=3), is_write=True)
    assert memory.job(NAME) is None
    memory.keep_job(make_job(version=3))
    assert memory.job(NAME) is not None


def make_pod(version: int) -> Json:
    labels = {"pseudoreal.dev/job-name": NAME[1]}
    metadata = {"namespace": NAME[0], "name": "pod", "uid": "pod", "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata}


@pytest.mark.parametrize("found", ["watch", "list of the watch", "list of a pass"])
def test_child_that_one_list_skipped_is_not_gone_for_ever(found: str) -> None:
    memory = listed_memory()
    memory.child_changed("Pod", "ADDED", make_pod(6))
    memory.was_read("Pod", NAME, {}, 7)
    memory.child_changed("Pod", "MODIFIED", make_pod(6))
    assert not memory.is_current("Pod", NAME), "the watch may tell an older version"
    if found == "watch":
        memory.child_changed("Pod", "MODIFIED", make_pod(8))
    elif found == "list of a pass":
        memory.was_read("Pod", NAME, {"pod": 6}, 8)
    else:
        listing = memory.watch("Pod", None).list_again()
        listing.add(make_pod(6))
        listing.finish("8")
    assert memory.is_current("Pod", NAME)


def test_jobs_of_one_namespace_leave_room_for_other_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST_KEPT_BYTES // 16  # of 125 jobs, as the real bound is of 2,000
    monkeypatch.setattr("pseudoreal_operator.observe.memory.MOST_KEPT_BYTES", most)
    memory, draw = listed_memory(), random.Random(0)
    for number in range(125):
        memory.keep_job(make_job(("evil", f"job-{number}"), text=draw.randbytes(125_000).hex()))
    memory.keep_job(make_job())
    assert memory.job(NAME) == make_job()
    kept = sum(len(job.data or b"") for job in memory._jobs.values())
    assert most // 8 < kept <= most // 4 + 1000
    for number in range(125):
        memory.forget_job(("evil", f"job-{number}"))
    memory.forget_job(NAME)
    assert not memory._kept, "the room is free again"


def test_all_namespaces_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_operator.observe.memory.MOST_KEPT_BYTES", 40_000)
    memory, draw = listed_memory(), random.Random(0)
    names = [(f"team-{number}", "a") for number in range(100)]
    for name in names:
        memory.keep_job(make_job(name, text=draw.randbytes(2000).hex()))
    kept = sum(memory.job(name) is not None for name in names)
    assert 10 < kept < 25


def test_jobs_that_have_ended_are_not_kept() -> None:
    memory = listed_memory()
    memory.keep_job(make_job(conditions=[{"type": "Complete", "status": "False"}]))
    assert memory.job(NAME) is not None
    memory.keep_job(make_job(version=2, conditions=[{"type": "Failed", "status": "True"}]))
    assert memory.job(NAME) is None
    assert not memory._kept
