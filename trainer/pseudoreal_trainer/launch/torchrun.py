"""torchrun as a process that is forked from one that has imported torch once: to import it takes seconds, to fork it
milliseconds, and both share their memory."""

import os
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

_CONTEXT = get_context("forkserver")
_IMPORTED = ["pseudoreal_trainer.cli.pod", "pseudoreal_trainer.rendezvous.start"]


def prepare_torchrun() -> None:
    """Imports torch in the process from which torchrun will be forked: a spare pod begins as soon as it is told to."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_nothing, name="prepares-torchrun")
    process.start()
    process.join()


def _nothing() -> None:
    """The process from which this one is forked has imported all by now."""


def start_torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> BaseProcess:
    """A torchrun that has this environment alone, and ends with its exit code."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_run, args=(list(arguments), dict(environment)), name="torchrun")
    process.start()
    return process


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    from pseudoreal_trainer.rendezvous.start import run

    os.environ.clear()
    os.environ.update(environment)
    run(arguments)
