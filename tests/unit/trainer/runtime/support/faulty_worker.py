"""A rank whose passes are slow or stuck while a file `slow-RANK` or `stuck-RANK` exists."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.passes import Passes, PlanRun

FAULTS = "PSEUDOREAL_TEST_FAULTS"
TIMES_SLOWER = 10


def install(folder: Path) -> None:
    """Make passes slow or stuck according to the files in `folder`."""
    for name in ("forward", "backward"):
        setattr(Passes, name, _faulty(getattr(Passes, name), folder))


def _faulty(act: Callable[[Passes, PlanRun, Any], None], folder: Path) -> Callable[[Passes, PlanRun, Any], None]:
    slow, stuck = (folder / f"{kind}-{os.environ['RANK']}" for kind in ("slow", "stuck"))

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
    install(Path(os.environ[FAULTS]))
    program.main()
