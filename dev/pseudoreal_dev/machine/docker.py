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
        # Some releases report an unreachable daemon here, with exit code 0.
        if errors := info.get("ServerErrors"):
            raise Missing(_no_answer(errors[0]))
        return Docker(system=info["OSType"], memory=info["MemTotal"], root=Path(info["DockerRootDir"]))
    except (ValueError, LookupError, TypeError) as error:
        reason = f"the program docker is not Docker's: `docker info` says {said[:100]!r}"
        raise Missing(Problem(reason, "Install Docker, or put it first on the PATH")) from error


def has_image(name: str) -> bool:
    return shell.succeeds([PROGRAM, "image", "inspect", name])


def save(name: str, archive: Path, log: Path) -> None:
    """Write an image into an archive. Raises CommandFailed."""
    archive.unlink(missing_ok=True)
    shell.run([PROGRAM, "image", "save", "--output", archive, name], log)


def _no_answer(said: str) -> Problem:
    is_refused = "permission denied" in said.lower()
    remedy = "Join the group docker and log in again, or use sudo" if is_refused else "Start Docker"
    return Problem(f"Docker does not answer ({' '.join(said.split())})", remedy)
