"""CONTRIBUTING.md lists the files that a training step passes through."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pseudoreal_trainer
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.training import phase

from tests.support.documents import ROOT

TRAINER = Path(pseudoreal_trainer.__file__).parent
STEPS = (2, 3)
"""Steps without validation and checkpoint. Two, because the thread of updates may run a step's updates only after the
next step has begun; the passes of step 3 wait for the updates of step 2."""


def documented_files() -> set[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("### One training step")[1].split("###")[0]
    table = section[section.index("| read |") :]
    return {path for path in re.findall(r"`([\w/]+\.py)", table) if (TRAINER / path).exists()}


@contextmanager
def recording(files: set[str], is_on: Callable[[], bool]) -> Iterator[None]:
    """Add the files of the trainer in which functions are called, on all threads that start from now on."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_on():
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(TRAINER):
                files.add(str(path.relative_to(TRAINER)))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def test_contributing_lists_the_files_of_a_training_step(
    config: Callable[[], PhaseConfig], train: Callable[[PhaseConfig], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    train_step = phase.train_step

    def counted(*arguments: Any, **options: Any) -> Any:
        steps.append(len(steps) + 1)
        return train_step(*arguments, **options)

    monkeypatch.setattr(phase, "train_step", counted)
    files: set[str] = set()
    with recording(files, lambda: len(steps) in STEPS):
        train(config())
    # The plan's records are data: nothing of that file is called.
    assert documented_files() - {"plan/records.py", "engine/state/disk.py", "engine/state/snapshot.py"} == files
