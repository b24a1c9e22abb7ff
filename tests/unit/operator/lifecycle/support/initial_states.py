"""Randomly drawn initial states of jobs."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

PHASES: list[dict[str, Any]] = [
    {"name": "one", "sharing": {"blocks": 2}, "until": {"step": 10}, "batch": {"sequences": 8}},
    {"name": "two", "sharing": {"blocks": 4}, "until": {"step": 20}, "batch": {"sequences": 8}, "workers": 2},
    {
        "name": "three",
        "until": {"step": 30},
        "batch": {"sequences": 8},
        "workers": 3,
        "elastic": {"minWorkers": 1, "patienceSeconds": 100},
    },
]
_SKEWS = [0.0, 3600.0, -3600.0]
"""Seconds by which the clocks of other machines are ahead."""
_TO_SPARES = 2
"""Number of stages before the one with spare pods."""
BAD_ENDS: list[dict[str, Any]] = [
    {"outcome": "Failed"},
    {"outcome": "Failed", "peer_lost": True},
    {"outcome": "Yielded"},
    {"outcome": "OutOfMemory"},
    {"outcome": "Failed", "exit_code": 139},
    {"outcome": "Failed", "exit_code": 137, "reason": "OOMKilled"},
]
HANG: dict[str, Any] = {"hang": True}


@dataclass(frozen=True)
class Beginning:
    """Initial state of a job. Some jobs start in the middle: with finished stages, lost workers, and earlier
    troubles."""

    spec: dict[str, Any]
    stages: int
    losses: list[dict[str, Any] | None]
    """Ends of workers' pods; None: a disruption; HANG: the worker's rank hangs."""
    troubles: list[str]
    nodes: int | None
    proxies: bool = False
    late_nodes: bool = False
    node_skew: float = 0.0
    api_skew: float = 0.0


@st.composite
def specs(draw: st.DrawFn, least_spares: int = 0) -> dict[str, Any]:
    deadlines = {
        "startupSeconds": draw(st.sampled_from([None, 500])),
        "activeSeconds": draw(st.sampled_from([None, None, 2000])),
        "onStartupTimeout": draw(st.sampled_from(["Restart", "Fail"])),
    }
    window = draw(st.sampled_from([None, 60, 1000]))
    return {
        "spec__phases": [PHASES[0], PHASES[1] | {"spares": draw(st.integers(least_spares, 2))}, PHASES[2]],
        "spec__restart": {"maxRestarts": draw(st.integers(0, 3)), "backoffSeconds": 5}
        | ({"windowSeconds": window} if window else {}),
        "spec__delink": {"timeoutSeconds": 400, "onTimeout": draw(st.sampled_from(["Fail", "RollBack"]))},
        "spec__hang": {
            "stepSeconds": 120,
            "startSeconds": 300,
            "action": draw(st.sampled_from(["Report", "Restart", "Fail"])),
        },
        "spec__deadlines": {key: value for key, value in deadlines.items() if value},
    }


def beginnings() -> st.SearchStrategy[Beginning]:
    return st.builds(
        Beginning,
        spec=specs(),
        stages=st.integers(0, 4),
        losses=st.just([]),
        troubles=st.lists(st.sampled_from(["failure", "restart in place", "preemption by a queue"]), max_size=3),
        nodes=st.sampled_from([None, 1, 2, 3]),
        proxies=st.booleans(),
        late_nodes=st.booleans(),
        node_skew=st.sampled_from(_SKEWS),
        api_skew=st.sampled_from(_SKEWS),
    )


def beginnings_with_losses() -> st.SearchStrategy[Beginning]:
    return st.builds(
        Beginning,
        spec=specs(least_spares=1),
        stages=st.just(_TO_SPARES),
        losses=st.lists(st.sampled_from([None, *BAD_ENDS, HANG]), min_size=1, max_size=2),
        troubles=st.lists(st.just("failure"), max_size=1),
        nodes=st.sampled_from([None, 2, 3]),
        proxies=st.booleans(),
        late_nodes=st.booleans(),
        node_skew=st.sampled_from(_SKEWS),
        api_skew=st.sampled_from(_SKEWS),
    )
