"""Times this version of the engine beside an earlier one: `python -m benchmarks.versions BASE`.

BASE is a commit. Both train the same batches; their runs take turns, so that a slower machine slows both.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Literal

import click
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.progress import progress

from benchmarks.environment import ENVIRONMENT
from benchmarks.launch import LOG, TORCHRUN
from benchmarks.versions_results import VERSIONS, VersionCase, VersionPair, Versions, VersionSteps

_PACKAGES = ("crds", "trainer")


class LossesDiffer(click.ClickException):
    """The versions train different models, so their times must not be compared."""


@click.command(help=__doc__)
@click.argument("base")
@click.option("--rounds", default=3, show_default=True)
@click.option("--only", default="", help="Cases whose label has this in it.")
def main(base: str, rounds: int, only: str) -> None:
    found = Versions(base=_commit(base), new=_commit("HEAD"), pairs=[])
    with _checkout(base) as older:
        for case in (c for c in cases() if only in c.label):
            with progress.step(case.label, log=LOG):
                found.pairs.append(_pair(case, older, rounds))
            progress.note(f"    {found.pairs[-1].speedup:.2f}×")
            VERSIONS.parent.mkdir(parents=True, exist_ok=True)
            VERSIONS.write_text(found.model_dump_json(indent=1) + "\n")


def cases() -> list[VersionCase]:
    homes: tuple[Literal["Host", "Disk"], ...] = ("Host", "Disk")
    everything = product(("tiny", "larger"), homes, (1, 4, 16), (False, True))
    return [VersionCase(model=m, home=h, micro_batches=n, mixed=mixed) for m, h, n, mixed in everything]


def _pair(case: VersionCase, older: Path, rounds: int) -> VersionPair:
    pair = VersionPair(case=case, base=[], new=[])
    for _ in range(rounds):
        pair.base.append(_run(case, older))
        pair.new.append(_run(case, Path.cwd()))
    reference = pair.base[0].losses
    for run in (*pair.base, *pair.new):
        if run.losses != reference:
            raise LossesDiffer(f"{case.label}: the losses are {run.losses} and {reference}; find out which is right")
    return pair


def _run(case: VersionCase, checkout: Path) -> VersionSteps:
    # The benchmark's programs come from this checkout, the engine from `checkout`.
    path = os.pathsep.join([*(str(checkout / package) for package in _PACKAGES), str(Path.cwd())])
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "steps.json")
        program = ("--module", "benchmarks.versions_rank", case.model_dump_json(), str(result))
        shell.run([sys.executable, *TORCHRUN, *program], LOG, environment=ENVIRONMENT | {"PYTHONPATH": path})
        return VersionSteps.model_validate_json(result.read_bytes())


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        _git("worktree", "add", "--quiet", "--detach", folder, commit)
        try:
            yield Path(folder)
        finally:
            _git("worktree", "remove", "--force", folder)


def _commit(name: str) -> str:
    return _git("rev-parse", "--short", name)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
