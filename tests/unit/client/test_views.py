"""Output of `get` and `describe`, compared with reviewed files. RENEW_GOLDEN=1 rewrites the files."""

from typing import Any

import pytest
from pseudoreal.observed_job import ObservedJob
from pseudoreal.pods import pod_of_rank, pod_state
from pseudoreal_client.view.description import description
from pseudoreal_client.view.rows import summary_line, table
from pseudoreal_operator.observe.reading import read_pod

from tests.unit.client.support.golden import golden
from tests.unit.client.support.observed_jobs import NOW, TRAINING, UNSCHEDULABLE, at, body, condition, job, pod

Json = dict[str, Any]

OOM = {
    "phase": "Failed",
    "containerStatuses": [
        {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": at(3)}}}
    ],
}
FAILED = TRAINING | {
    "state": "Failed",
    "currentPhase": None,
    "completionTime": at(1),
    "conditions": [condition("Failed", "True", "OutOfMemory", "Pod 1 was out of memory. Raise\nresources.limits.")],
}
EVENTS: list[Json] = [
    {"type": "Warning", "reason": "HangDetected", "message": "No step for 9 s.", "eventTime": at(4), "metadata": {}},
    {"type": "Normal", "reason": "Accepted", "message": "The job is valid.", "lastTimestamp": at(90), "metadata": {}},
]
IN_PLACE = TRAINING | {
    "restarts": 2,
    "restartsInPlace": {
        "phase": "real",
        "execution": 2,
        "restarts": 1,
        "message": "Pod llm-real-abcdef-e2-1 (worker 1): local rank 0 ended without a message.",
    },
    "faults": [
        *TRAINING["faults"],
        TRAINING["faults"][0] | {"execution": 2, "time": at(10), "pod": "llm-real-abcdef-e2-1", "restartInPlace": 1},
    ],
}
REQUEST = [{"id": "finish-1", "type": "FinishPhase", "phase": "real"}]
MIXTURE = TRAINING | {
    "progress": TRAINING["progress"]
    | {"experts": {"largest": "2.1250", "idle": "0.0312", "dropped": "0.0500", "routerEntropy": "2.0794"}}
}
PLACED = TRAINING | {
    "placement": {
        "phaseName": "real",
        "execution": 2,
        "nodes": [
            {"node": "gpu-3", "ranks": "0-3", "workers": "0,2"},
            {"node": "gpu-1", "ranks": "4-5", "workers": "1"},
        ],
        "omittedNodes": 1,
    }
}
"""Four pods; one is on a node that was omitted from the status for lack of room."""
ELASTIC = TRAINING | {
    "elastic": {
        "phaseName": "real",
        "workers": 2,
        "since": at(300),
        "growAfter": at(-2700),
        "message": "2 of 4 pods had a node after 300 s.",
    }
}
AUTO: Json = TRAINING | {
    "phases": [
        TRAINING["phases"][0],
        TRAINING["phases"][1]
        | {
            "layout": {
                "pipeline": 2,
                "replicas": 1,
                "expertRanks": 1,
                "schedule": "Layered",
                "stateSharding": "None",
                "microBatches": 4,
                "keep": "Inputs",
                "hardware": "assumed CPUs",
                "stepTime": "0.25",
                "bottleneck": "the forward and backward passes of pipeline rank 1 take 91% of the step",
            }
        },
    ]
}
"""The operator chose the second phase's layout."""
DESCRIBED: dict[str, tuple[ObservedJob, list[Json], list[Json]]] = {
    "training": (job(TRAINING, spec__phases__1__processesPerWorker=2), [pod(1), pod(0), pod(0, execution=1)], EVENTS),
    "auto": (job(AUTO), [], []),
    "mixture": (job(MIXTURE), [pod(1), pod(0)], []),
    "placed": (
        job(
            PLACED,
            spec__phases__1__processesPerWorker=2,
            spec__phases__1__workers=4,
            spec__phases__1__batch={"sequences": 8},
            spec__scheduling={"topology": {"preferred": "topology.kubernetes.io/zone"}},
        ),
        [pod(0, node="gpu-3"), pod(1, node="gpu-1"), pod(2, node="gpu-3"), pod(3, node="gpu-8")],
        [],
    ),
    "elastic": (job(ELASTIC, spec__phases__1__workers=4, spec__phases__1__elastic={"minWorkers": 1}), [], []),
    "in-place": (job(IN_PLACE), [pod(1), pod(0)], []),
    "growing": (job(TRAINING, spec__phases__0__layers=4), [pod(1), pod(0)], []),
    "fresh": (job(), [], []),
    "pending": (job({"state": "Pending", "execution": 1}), [pod(0, phase="pseudo", node="", status=UNSCHEDULABLE)], []),
    "failed": (job(FAILED, spec__requests=REQUEST), [pod(0), pod(1, status=OOM)], []),
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_description_matches_its_golden_file(name: str) -> None:
    seen, pods, events = DESCRIBED[name]
    lines = description(seen, seen.current_pods(pods), events, NOW)
    assert "\n".join(lines) + "\n" == golden(f"describe-{name}", lines)


@pytest.mark.parametrize("wide", [False, True])
def test_table_matches_its_golden_file(wide: bool) -> None:
    lines = table([job(TRAINING), job(), job(FAILED)], NOW, wide=wide, namespaces=wide)
    assert "\n".join(lines) + "\n" == golden("get-wide" if wide else "get", lines)


def test_remaining_time_of_a_phase_shrinks_between_reports() -> None:
    # Half a minute ago, 100 s were left.
    assert job(TRAINING).remaining_of_phase(NOW) == 70
    assert job(TRAINING | {"state": "Restarting"}).remaining_of_phase(NOW) is None


def test_remaining_time_of_the_job_assumes_the_current_rate_for_later_phases() -> None:
    first = TRAINING | {"currentPhase": "pseudo"}
    # The second phase has 10 steps of 8 sequences of 32 tokens: 2560 tokens, which take 200 s at 12.8 tokens/s.
    assert job(first).remaining_of_job(NOW) == 270
    assert job(TRAINING).remaining_of_job(NOW) == 70
    silent = first | {"progress": {**TRAINING["progress"], "tokensPerSecond": None}}
    assert job(silent).remaining_of_job(NOW) is None


def test_a_job_with_a_spec_of_another_release_is_described_from_its_status() -> None:
    newer = job(TRAINING, spec__somethingNew={"a": 1})
    assert newer.spec is None
    assert any("Training" in line for line in description(newer, [], [], NOW))
    assert newer.remaining_of_job(NOW) is None


def test_current_pods_are_those_of_this_job_and_its_newest_execution() -> None:
    bodies = [pod(0), pod(0, execution=1), pod(1, uid="another"), pod(0, stage="delink")]
    assert [one.name for one in job(TRAINING).current_pods(bodies)] == ["llm-real-abcdef-e2-0"]


def test_pod_of_rank_finds_the_pod() -> None:
    seen = job(TRAINING, spec__phases__1__processesPerWorker=2)
    pods = seen.current_pods([pod(0), pod(1)])
    found = [pod_of_rank(seen, pods, rank) for rank in range(5)]
    assert [one and one.index for one in found] == [0, 0, 1, 1, None]


def test_untrusted_text_has_no_terminal_control_characters() -> None:
    said = {"phase": "Pending", "conditions": [{**UNSCHEDULABLE["conditions"][0], "message": "\x1b[2Jgone\nfar"}]}
    assert pod_state(read_pod(pod(0, status=said))) == "Pending (Unschedulable: ␛[2Jgone far)"
    evil = TRAINING | {"conditions": [condition("Progressing", "True", "Training", "\x1b]0;owned\x07")]}
    lines = description(job(evil), [], [{**EVENTS[0], "message": "\x1b[31m"}], NOW)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (TRAINING, "Training  phase real  step 15 of 20 (75%)  loss 3.2500  1m10s left"),
        (FAILED, "Failed  Pod 1 was out of memory. Raise resources.limits."),
        (None, "Pending"),
    ],
)
def test_summary_line_has_state_phase_and_progress(status: Json | None, line: str) -> None:
    assert summary_line(ObservedJob(body(status)), NOW) == line
