"""Run a rank's preflight check with an injected defect, as a program or forked from a process that has
imported torch."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pseudoreal_trainer.preflight import probes
from pseudoreal_trainer.preflight.__main__ import main
from pseudoreal_trainer.preflight.check import Limits

from tests.support.processes import Forked, preload

preload("tests.support.warm")

PATIENT = Limits(start=300, product=120, pairing=120, answer=120)
QUICK = Limits(start=60, product=4, pairing=2, answer=3)
"""For tests with a silent rank, which uses up the limits of product, pairings and answer. Sound ranks need a tenth of a
second."""

_multiply = probes.multiply


def slow(left: Any, right: Any) -> Any:
    for _ in range(9):
        _multiply(left, right)
    return _multiply(left, right)


def wrong(left: Any, right: Any) -> Any:
    """Return the product with one wrong element."""
    answer = _multiply(left, right)
    answer[100, 200] += 1
    return answer


def silent(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


DEFECTS: dict[str, Any] = {"none": _multiply, "slow": slow, "wrong": wrong, "silent": silent, "killed": killed}


def start(environment: dict[str, str], defect: str, limits: Limits, config: Path, diagnosis: Path, log: Path) -> Forked:
    return Forked(_run, environment, defect, limits, [str(config), str(diagnosis)], log=log)


def _run(environment: dict[str, str], defect: str, limits: Limits, arguments: list[str]) -> None:
    os.environ.update(environment)
    sys.argv = ["", *arguments]
    probes.multiply = DEFECTS[defect]
    main(limits)


if __name__ == "__main__":
    probes.multiply = DEFECTS[sys.argv.pop(1)]
    main(PATIENT)
