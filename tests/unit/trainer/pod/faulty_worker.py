"""A rank whose main thread is slow or stuck while a file `slow-RANK` or `stuck-RANK` says so."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.passes import Passes, PlanRun

FAULTS = "PSEUDOREAL_TEST_FAULTS"
TIMES_SLOWER = 10


def _faulty(act: Callable[[Passes, PlanRun, Any], None]) -> Callable[[Passes, PlanRun, Any], None]:
    folder, rank = Path(os.environ[FAULTS]), os.environ["RANK"]
    slow, stuck = folder / f"slow-{rank}", folder / f"stuck-{rank}"

    def acted(passes: Passes, run: PlanRun, step: Any) -> None:
        while stuck.exists():
            pass
        begin = time.monotonic()
        act(passes, run, step)
        end = begin + TIMES_SLOWER * (time.monotonic() - begin)
        while slow.exists() and time.monotonic() < end:
            pass

    return acted


if __name__ == "__main__":
    for name in ("forward", "backward"):
        setattr(Passes, name, _faulty(getattr(Passes, name)))
    program.main()
