"""Docker on this machine, or the one that DOCKER_HOST or its context names."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import Missing, Problem

PROGRAM = "docker"
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Docker:
    """Facts about the daemon. `memory`: bytes. `root`: folder of images and containers, on the daemon's machine."""

    version: str
    system: str
    memory: int
    root: Path


def look() -> Docker:
    """Ask the daemon. Raises Missing if it does not answer."""
    if shutil.which(PROGRAM) is None:
        raise Missing(Problem("docker is not on the PATH", "Install Docker"))
    try:
        said = shell.output([PROGRAM, "info", "--format", "{{json .}}"], seconds=ANSWER_SECONDS)
    except shell.CommandFailed as error:
        raise Missing(_no_answer(error.said or str(error))) from error
    try:
        info = json.loads(said)
    except ValueError as error:
        raise Missing(Problem(f"`docker info` says what cannot be read: {said[:200]!r}", "Install Docker")) from error
    # Some releases report an unreachable daemon here, with exit code 0.
    if errors := info.get("ServerErrors"):
        raise Missing(_no_answer(errors[0]))
    return Docker(
        version=info.get("ServerVersion", ""),
        system=info.get("OSType", ""),
        memory=info.get("MemTotal", 0),
        root=Path(info.get("DockerRootDir") or "/var/lib/docker"),
    )


def has_image(name: str) -> bool:
    return shell.succeeds([PROGRAM, "image", "inspect", name])


def save(name: str, archive: Path, log: Path) -> None:
    """Write an image into an archive. Raises CommandFailed."""
    archive.unlink(missing_ok=True)
    shell.run([PROGRAM, "image", "save", "--output", archive, name], log)


def _no_answer(said: str) -> Problem:
    return Problem(f"Docker does not answer ({' '.join(said.split())})", "Start Docker")
