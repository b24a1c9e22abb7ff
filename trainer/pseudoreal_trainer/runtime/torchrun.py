"""torchrun as a process forked from a process that has imported torch once: the import takes seconds, the fork
milliseconds, and both share their memory."""

import os
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

_CONTEXT = get_context("forkserver")
_IMPORTED = ["pseudoreal_trainer.cli.pod", "pseudoreal_trainer.runtime.rendezvous.start"]


def prepare_torchrun() -> None:
    """Import torch in the process from which torchrun will be forked, so that a spare pod can start as soon as it is
    told."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_nothing, name="prepares-torchrun")
    process.start()
    process.join()


def _nothing() -> None:
    """Do nothing: the process from which this one is forked has imported everything by now."""


def start_torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> BaseProcess:
    """Start and return a torchrun with exactly this environment; the process ends with torchrun's exit code."""
    _CONTEXT.set_forkserver_preload(_IMPORTED)
    process = _CONTEXT.Process(target=_run, args=(list(arguments), dict(environment)), name="torchrun")
    process.start()
    return process


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    from pseudoreal_trainer.runtime.rendezvous.start import run

    os.environ.clear()
    os.environ.update(environment)
    run(arguments)
