"""A rank 0 that fails in the first forward pass after it was to agree with the others."""

import os
from typing import Any

from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine import runner
from pseudoreal_trainer.plan.steps import Agree, Forward

_PASS, _AGREE = runner._ACTIONS[Forward], runner._ACTIONS[Agree]
_AGREED: list[Agree] = []


def _agree(run: runner.Run, step: Any) -> None:
    _AGREED.append(step)
    _AGREE(run, step)


def _fail(run: runner.Run, step: Any) -> None:
    if _AGREED and os.environ["RANK"] == "0":
        raise OSError("the disk has failed")
    _PASS(run, step)


if __name__ == "__main__":
    runner._ACTIONS[Agree], runner._ACTIONS[Forward] = _agree, _fail
    program.main()
