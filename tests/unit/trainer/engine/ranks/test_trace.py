"""Traces of ranks contain every pass of the plan, once per step, in the file of its rank."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.plan.records import Backward, Forward

from tests.support.forked import start_rank
from tests.support.ports import free_port
from tests.support.processes import succeed
from tests.unit.trainer.engine.support.recorded import RecordedStreams

STEPS = (2, 4)
"""Step at the end of each phase."""

Pass = tuple[str, int, int]
"""Kind, position and micro-batch."""


@pytest.fixture
def traces(job_body: dict[str, Any], config: Callable[..., PhaseConfig], delink_of: Any, tmp_path: Path) -> Path:
    """Folder with the traces of two phases: with offload on one rank, then in a pipeline of two."""
    first, second = job_body["spec"]["phases"]
    first |= {"until": {"step": STEPS[0]}, "offload": {"home": "Disk"}}
    second |= {"until": {"step": STEPS[1]}, "parallelism": {"pipeline": 2}}
    folder = tmp_path / "traces"
    _train(config(0), folder)
    delink(delink_of(1))
    _train(config(1), folder)
    return folder


def _train(phase: PhaseConfig, traces: Path) -> None:
    """Train a phase with the program of its ranks."""
    file, port = traces.with_name(f"{phase.phase}.json"), free_port()
    file.write_text(phase.model_copy(update={"trace_directory": str(traces)}).to_json())
    pods = [traces.with_name(f"{phase.phase}-{rank}") for rank in range(phase.ranks)]
    ranks = [start_rank(file, rank, phase.ranks, port, pod) for rank, pod in enumerate(pods)]
    succeed(ranks)


def _passes_done(file: Path) -> dict[int, Counter[Pass]]:
    """Return step -> passes, from a file in the JSON object format of Chrome traces."""
    content = json.loads(file.read_text())
    done: dict[int, Counter[Pass]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] > 0
            assert event["dur"] >= 0
        if event.get("tid") == "compute":
            args = event["args"]
            done.setdefault(args["step"], Counter())[event["name"], args["position"], args["micro_batch"]] += 1
    return done


def test_trace_has_every_pass_once_per_step(traces: Path, config: Callable[..., PhaseConfig]) -> None:
    for index, (before, end) in enumerate(zip((0, *STEPS), STEPS, strict=False)):
        phase = config(index)
        layout = phase_layout(phase, "cpu")
        plan = step_plan(layout)
        files = sorted((traces / phase.phase).iterdir())
        assert [file.name for file in files] == [f"rank-{rank:04d}.trace.json" for rank in range(phase.ranks)]
        for rank, file in enumerate(files):
            expected = Counter(
                (type(step).__name__, step.position, step.micro_batch)
                for step in plan[rank // layout.data]
                if isinstance(step, Forward | Backward)
            )
            assert set(expected.values()) == {1}
            assert _passes_done(file) == dict.fromkeys(range(before + 1, end + 1), expected)


class _Slow(int):
    """Number of bytes that another thread overtakes during its addition."""

    def __new__(cls, size: int, meanwhile: Callable[[], None]) -> "_Slow":
        made = super().__new__(cls, size)
        made.meanwhile = meanwhile  # type: ignore[attr-defined]
        return made

    def __radd__(self, other: int) -> int:
        self.meanwhile()  # type: ignore[attr-defined]
        return int(self) + other


def test_trace_counts_bytes_of_concurrent_threads() -> None:
    trace = Trace(0)
    other = threading.Thread(target=trace.count_bytes, args=("h2d", 1))

    def meanwhile() -> None:
        other.start()
        # It either counts now, or has to wait for this thread; then this ends in vain.
        other.join(0.2)

    trace.count_bytes("h2d", _Slow(2, meanwhile))
    other.join()
    assert trace.moved["h2d"] == 3


def test_trace_records_gpu_passes_at_their_execution_time(tmp_path: Path) -> None:
    """The time of a pass is that of its execution, which comes after its launch; and no launch waits for the
    execution."""
    trace, streams = Trace(0, tmp_path), RecordedStreams(real=True)
    trace.begin_step(1)
    for m in range(2):
        with trace.gpu_span("compute", Forward(1, m), streams):
            streams.record_event()
    trace.begin_step(2)
    assert not trace.events, "the GPU has not come to them"
    reached = [who for what, who in streams.log if what == "synchronize"]
    assert len(reached) == 1, "only the first moment of all is waited for"
    streams.log += [("synchronize", who) for what, who in streams.log if what == "record_event"]
    trace.close()
    first, second = trace.events
    assert [first["dur"], second["dur"]] == [2000.0, 2000.0], "two events of a millisecond"
    assert second["ts"] - first["ts"] == pytest.approx(3000.0)
    assert {event["args"]["step"] for event in trace.events} == {1}


def test_trace_records_cpu_passes_at_their_call_time() -> None:
    trace, streams = Trace(0), RecordedStreams()
    trace.is_recording = True
    with trace.gpu_span("compute", Forward(1, 0), streams):
        pass
    assert [event["name"] for event in trace.events] == ["Forward"]
    assert not streams.log
