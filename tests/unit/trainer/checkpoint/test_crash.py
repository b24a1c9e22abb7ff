"""SIGKILL at every kind of point of a job's life on disk: the job resumes from any state and ends with the same
weights.

The points are counted operating system calls that touch the checkpoints, in all threads. Nothing depends on timing.
"""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.tensor_file import TensorWriter
from pseudoreal_trainer.plan.units import KINDS

from tests.support.depth import DEPTH
from tests.support.processes import Forked, preload, succeed

preload("tests.support.warm")

POINTS = DEPTH.of(8, 1000)
"""Number of points besides the first point of every kind."""
_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
_Job = tuple[PhaseConfig, DelinkConfig, PhaseConfig]


def _visit(job: _Job, visited: Callable[[str], None]) -> None:
    """Run the job from its current state, and call `visited` before each point."""
    import torch
    from pseudoreal_trainer.data.corpus import load_corpus
    from pseudoreal_trainer.engine.ranks.ranks import Ranks
    from pseudoreal_trainer.training import validation
    from pseudoreal_trainer.training.phase import train_phase

    torch.set_num_threads(1)
    validation.SAMPLE_TOKENS = 1
    folder, append, fsync = str(Path(job[0].work_directory) / "checkpoints"), TensorWriter.append, os.fsync

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and arguments and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(folder):
                how = arguments[1] if event == "open" and isinstance(arguments[1], str) else ""
                visited(f"{event} {re.sub('[0-9]+', 'N', path.removeprefix(folder))} {how}")

    def appended(self: TensorWriter, content: Any) -> None:
        visited(f"write {re.sub('[0-9]+', 'N', self.path.name)}")
        append(self, content)

    def synced(descriptor: int) -> None:
        visited(f"fsync {re.sub('[0-9]+', 'N', os.readlink(f'/proc/self/fd/{descriptor}').removeprefix(folder))}")
        fsync(descriptor)

    sys.addaudithook(audit)
    os.fsync = synced  # type: ignore[assignment]
    TensorWriter.append = appended  # type: ignore[method-assign]
    first, between, second = job
    for config in (first, second):
        if config is second:
            delink(between)
        corpus = load_corpus(config.data, config.model.sequence_length)
        train_phase(config, corpus, Ranks(0, 1, torch.device("cpu")), lambda: False)


def _to_the_end(job: _Job, file: Path) -> None:
    points: list[str] = []
    _visit(job, points.append)
    file.write_text("\n".join(points))


def _until_killed(job: _Job, point: int) -> None:
    count = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def visited(_: str) -> None:
        nonlocal count
        if count == point:
            die()
        count += 1

    _visit(job, visited)


def _whole(job: _Job) -> list[str]:
    file = Path(job[0].work_directory).with_suffix(".points")
    succeed([Forked(_to_the_end, job, file)])
    return file.read_text().split("\n")


def _killed(job: _Job, point: int) -> int:
    return Forked(_until_killed, job, point).wait()


@pytest.fixture
def job(job_body: Any, config: Any, delink_of: Any) -> Callable[[str], _Job]:
    """Two phases of three steps; every step is saved, and only the newest checkpoint is kept."""
    spec = job_body["spec"]
    spec["checkpoint"] |= {"everySteps": 1, "keepLast": 1, "bufferBytes": 4096}
    spec["model"]["layers"] = 2
    spec["data"]["validation"] |= {"everySteps": 100, "sequences": 2}
    spec["phases"][0]["until"]["step"], spec["phases"][1]["until"]["step"] = 3, 6
    spec["phases"][1]["workers"] = 1
    return lambda work: (config(0, work), delink_of(1, work), config(1, work))


def _end(job: _Job) -> Reader:
    store = CheckpointStore(Path(job[2].work_directory), job[2].job.uid)
    found = store.newest("real", complete=True)
    assert found is not None
    return found


def _chosen(points: list[str]) -> list[int]:
    """Return the first point of every kind, and others at even distances."""
    firsts = {label: index for index, label in reversed([*enumerate(points)])}
    even = {index * len(points) // POINTS for index in range(POINTS)}
    return sorted({*firsts.values(), *even})


def _again(job: _Job, execution: int) -> _Job:
    """Return the job without anything that execution 1 made."""
    rule = DiscardConfig(before_execution=2, from_step=0)
    return _of_execution(job, execution, discards={"pseudo": [rule], "real": [rule]})


def _of_execution(job: _Job, execution: int, **more: Any) -> _Job:
    first, between, second = job
    change = {"execution": execution, **more}
    return (
        first.model_copy(update=change),
        between.model_copy(update=change),
        second.model_copy(update=change),
    )


def _removals(points: list[str]) -> list[int]:
    """Return the first point of every kind that removes or renames a file."""
    firsts = {label: index for index, label in reversed([*enumerate(points)])}
    return sorted(index for label, index in firsts.items() if label.startswith(("os.rem", "os.rm", "shutil", "os.ren")))


def test_a_job_that_is_trained_again_and_killed_while_it_replaces_files_ends_with_the_same_weights(
    job: Callable[[str], _Job], tmp_path: Path
) -> None:
    _whole(job("first"))
    expected = _end(job("first"))
    shutil.copytree(tmp_path / "first", tmp_path / "counted")
    points = _whole(_again(job("counted"), 2))
    chosen = _removals(points)
    assert len(chosen) >= 6, points
    killed = 0
    for index in chosen:
        work = f"killed-{index}"
        shutil.copytree(tmp_path / "first", tmp_path / work)
        # Threads take turns as they like: a life may have some points fewer than the one that was counted.
        exit_code = _killed(_again(job(work), 2), index)
        assert exit_code in (-signal.SIGKILL, 0), points[index]
        killed += exit_code != 0
        store = CheckpointStore(tmp_path / work, job(work)[0].job.uid)
        for manifest in store.committed():
            store.verify(manifest)
        _whole(_again(job(work), 3))
        found = _end(job(work))
        assert {manifest.execution for manifest in store.committed()} <= {2, 3}, points[index]
        assert found.manifest.step == expected.manifest.step
        for name, array in expected.whole().items():
            assert np.array_equal(found.tensor(name), array), points[index]
    assert killed >= len(chosen) - 1


def test_a_job_that_is_killed_anywhere_ends_with_the_same_weights(job: Callable[[str], _Job]) -> None:
    points = _whole(job("whole"))
    expected = _end(job("whole"))
    chosen = _chosen(points)
    assert len({points[index] for index in chosen}) >= 25, sorted({points[index] for index in chosen})
    killed = 0
    for index in chosen:
        work = f"killed-{index}"
        # Threads take turns as they like: a life may have some points fewer than the one that was counted.
        exit_code = _killed(job(work), index)
        assert exit_code in (-signal.SIGKILL, 0), points[index]
        killed += exit_code != 0
        # Another one: an execution never goes back to a phase before, and the fence says so.
        _whole(_of_execution(job(work), 2))
        found = _end(job(work))
        assert found.manifest.step == expected.manifest.step
        for kind in KINDS:
            for name, array in expected.whole(kind).items():
                assert np.array_equal(found.tensor(name, kind), array), points[index]
    assert killed >= 25
