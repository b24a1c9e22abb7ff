"""A rank 0 that fails in the first forward pass after it was to agree with the others."""

import os
from typing import Any

from pseudoreal_trainer.cli import rank as program
from pseudoreal_trainer.engine.passes import Passes
from pseudoreal_trainer.engine.updates import Reductions
from pseudoreal_trainer.plan.records import Agree

_PASS, _AGREE = Passes.forward, Reductions.agree
_AGREED: list[Agree] = []


def _agree(reductions: Reductions, step: Agree, *loss: Any, **asked: Any) -> Any:
    _AGREED.append(step)
    return _AGREE(reductions, step, *loss, **asked)


def _fail(passes: Passes, *step: Any) -> None:
    if _AGREED and os.environ["RANK"] == "0":
        raise OSError("the disk has failed")
    _PASS(passes, *step)


if __name__ == "__main__":
    Reductions.agree, Passes.forward = _agree, _fail  # type: ignore[method-assign]
    program.main()
