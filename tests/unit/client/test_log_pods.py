"""Which pods' logs are selected."""

import pytest
from pseudoreal.errors import NotFound
from pseudoreal.pods import has_started, line_prefix, not_started, pods_to_read
from pseudoreal_operator.observe.reading import read_pod

from tests.unit.client.support.observed_jobs import TRAINING, job, pod

SEEN = job(TRAINING, spec__phases__1__processesPerWorker=2)
BODIES = [
    *(pod(index, execution=2) for index in (1, 0)),
    pod(0, execution=1),
    pod(0, execution=1, stage="delink"),
    pod(0, execution=1, phase="pseudo"),
]


def names(rank: int | None = None, previous: bool = False, bodies: int = 5) -> list[str]:
    return [one.name for one in pods_to_read(SEEN, BODIES[-bodies:], rank, previous=previous)]


def test_logs_are_of_the_newest_execution() -> None:
    assert names() == ["llm-real-abcdef-e2-0", "llm-real-abcdef-e2-1"]
    assert names(rank=3) == ["llm-real-abcdef-e2-1"]


def test_ranks_by_topology_are_read_from_the_status() -> None:
    placement = {"phaseName": "real", "execution": 2, "nodes": [{"node": "a", "ranks": "0-3", "workers": "1,0"}]}
    seen = job(
        TRAINING | {"placement": placement},
        spec__phases__1__processesPerWorker=2,
        spec__scheduling={"topology": {"preferred": "rack"}},
    )
    (found,) = pods_to_read(seen, BODIES, 3, previous=False)
    assert (found.index, line_prefix(seen, found)) == (0, "[real e2 rank 2-3] ")
    (before,) = pods_to_read(seen, BODIES, None, previous=True)
    assert line_prefix(seen, before) == "[real e1 rank -] ", "ranks of an earlier execution are unknown"


def test_previous_execution_may_be_the_delink_of_the_same_number() -> None:
    assert names(previous=True) == ["llm-real-abcdef-e1-0"]
    # Delink and training have the same number, and the delink ran first.
    before = pods_to_read(SEEN, BODIES[-3:], None, previous=True)
    assert [line_prefix(SEEN, one) for one in before] == ["[real-delink e1 rank 0] "]
    assert names(previous=True, bodies=2) == ["llm-pseudo-abcdef-e1-0"]


def test_line_prefix_has_phase_execution_and_ranks() -> None:
    assert [line_prefix(SEEN, one) for one in pods_to_read(SEEN, BODIES, 3, previous=False)] == ["[real e2 rank 2-3] "]


@pytest.mark.parametrize(
    ("rank", "previous", "bodies", "says"),
    [
        (4, False, 5, "no pod of rank 4 of llm; there are those of 0-1, 2-3"),
        (None, True, 1, "no pods of an earlier execution of llm"),
    ],
)
def test_a_missing_execution_or_rank_is_an_error(rank: int | None, previous: bool, bodies: int, says: str) -> None:
    with pytest.raises(NotFound, match=says):
        names(rank, previous, bodies)


def test_a_job_without_pods_is_an_error() -> None:
    with pytest.raises(NotFound, match="no pods of any execution of llm"):
        pods_to_read(SEEN, [], None, previous=False)


def test_a_pod_that_has_not_started_is_reported_with_its_state() -> None:
    read = read_pod(pod(0, status={"phase": "Pending"}))
    assert not has_started(read)
    assert not_started(read) == "pod llm-real-abcdef-e2-0 has not begun: Pending"
