"""Three ranks that train together: a stuck or slow rank can be named from the reports of their pods."""

import copy
from collections.abc import Iterator

import pytest
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.wire.reports import RankReport
from pseudoreal_operator.failures.hang import stragglers, suspected_ranks

from tests.support.jobs import good_job
from tests.unit.trainer.runtime.support.world import World, world

pytestmark = pytest.mark.solo

FACTOR = 3.0
HEALTHY_STEPS = 100


@pytest.fixture(scope="module", params=["None", "Full"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield three ranks in training. Steps are long enough that noise of the machine averages out over ten of them.

    With `stateSharding: Full`, ranks wait in gathers of weights as well as in reductions.
    """
    folder = tmp_path_factory.mktemp("trio")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("the lord said unto the king of israel. " * 500)
    body = copy.deepcopy(good_job())
    body["metadata"]["uid"] = "11111111-2222"
    spec = body["spec"]
    spec["model"] = {
        "layers": 4,
        "hiddenSize": 64,
        "attention": {"heads": 2},
        "sequenceLength": 32,
        "feedForward": {"size": 256},
    }
    spec["data"] = {
        "path": str(folder / "corpus"),
        "pattern": "*.txt",
        "validation": {"fraction": "0.1", "everySteps": 10**9, "sequences": 3},
    }
    spec["precision"] = {"compute": "float32"}
    spec["checkpoint"] = {"everySteps": 10**9}
    batch = {"sequences": 12, "microBatches": 2}
    sharding = {"stateSharding": request.param}
    spec["phases"] = [{"name": "real", "until": {"step": 10**6}, "workers": 3, "batch": batch, "parallelism": sharding}]
    config = phase_config(
        PseudoRealJob.from_object(body),
        0,
        execution=1,
        work_directory=str(folder / "work"),
        offload_directory=str(folder / "offload"),
    )
    with world(config, folder) as found:
        found.wait_for(lambda beats: min(beat.step for beat in beats) >= 15)
        yield found


def _waiting(heartbeats: list[RankReport]) -> list[int]:
    return [beat.rank for beat in heartbeats if beat.activity == "waiting"]


def test_no_rank_is_suspected_while_all_ranks_work(trio: World) -> None:
    begin = trio.heartbeats()[0].step
    judged: dict[int, float] = {}

    def judge(heartbeats: list[RankReport]) -> bool:
        assert stragglers(heartbeats, FACTOR) == []
        judged[heartbeats[0].step] = max((ratio for _, ratio in stragglers(heartbeats, 1.0)), default=1.0)
        return min(beat.step for beat in heartbeats) >= begin + HEALTHY_STEPS

    trio.wait_for(judge)
    print(f"{len(judged)} moments; slowest rank at most {max(judged.values()):.2f} times the median")
    assert len(judged) >= 10


def _is_stuck(heartbeats: list[RankReport]) -> bool:
    """Return whether rank 1 is stuck for over a second: even without the fault, the others wait for it at times."""
    return _waiting(heartbeats) == [0, 2] and heartbeats[1].seconds > 1


def test_a_stuck_main_thread_is_suspected_although_its_process_lives(trio: World) -> None:
    with trio.fault("stuck", 1):
        heartbeats = trio.wait_for(_is_stuck)
        assert suspected_ranks(heartbeats) == [1]
        assert (heartbeats[1].activity, heartbeats[1].doing) == ("computing", "a step")
        assert heartbeats[1].process not in "TZX"
        assert {heartbeats[rank].doing for rank in (0, 2)} <= {
            "agrees on the step",
            *(f"{waits} unit {u}" for waits in ("gathers", "reduces") for u in range(6)),
        }
        later = trio.wait_for(lambda now: now[1].seconds > heartbeats[1].seconds + 0.5)
        assert suspected_ranks(later) == [1]
        assert [beat.step for beat in later] == [beat.step for beat in heartbeats]
    trio.makes_steps(2)


def test_a_process_stopped_while_computing_is_suspected(trio: World) -> None:
    with trio.fault("stuck", 1):
        trio.wait_for(_is_stuck)
        with trio.stopped(1):
            heartbeats = trio.wait_for(lambda beats: beats[1].process == "T")
            assert heartbeats[1].activity == "computing"
            assert suspected_ranks(heartbeats) == [1]
    trio.makes_steps(2)


def test_a_process_stopped_inside_a_collective_is_suspected(trio: World) -> None:
    with trio.fault("stuck", 1):
        trio.wait_for(_is_stuck)
        with trio.stopped(2):
            (trio.folder / "stuck-1").unlink()
            heartbeats = trio.wait_for(lambda beats: _waiting(beats) == [0, 1, 2] and beats[2].process == "T")
            assert suspected_ranks(heartbeats) == [2]
            # All wait in one step, each in any of its collectives: without the process state, no rank is named.
            unknown = [beat.model_copy(update={"process": ""}) for beat in heartbeats]
            assert suspected_ranks(unknown) == []
    trio.makes_steps(2)


def test_a_rank_that_computes_ten_times_as_long_is_a_straggler(trio: World) -> None:
    def named() -> list[int]:
        return [rank for rank, _ in stragglers(trio.heartbeats(), FACTOR)]

    with trio.fault("slow", 0):
        # Faults of other tests leave a rank's mean only after some steps.
        trio.wait_for(lambda _: named() == [0])
        trio.makes_steps(10)
        assert named() == [0]
    trio.makes_steps(12)
    assert named() == []
