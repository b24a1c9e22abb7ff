"""buildah with a storage of its own, away from any other on the machine."""

from collections.abc import Mapping
from pathlib import Path

from pseudoreal_dev.machine import mounts, paths, shell

ENVIRONMENT: Mapping[str, str] = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
# In memory, for after a restart of the machine nothing of it is true.
RUN = Path("/run/pseudoreal/storage")


def run(*words: str | Path, log: Path) -> None:
    """Runs a buildah command to its end. Raises CommandFailed with the log's end."""
    shell.run([*_program(), *words], log, environment=ENVIRONMENT)


def output(*words: str | Path) -> str:
    """What a buildah command prints, without the final newline."""
    return shell.output([*_program(), *words], environment=ENVIRONMENT).strip()


def images() -> list[str]:
    """The names, with their tags, of all images that have one."""
    names = output("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split()
    return [name for name in names if "<none>" not in name]


def clear_leftovers() -> None:
    """Removes the working containers of interrupted builds."""
    mounts.unmount_below(storage())
    if output("containers", "--quiet"):
        output("rm", "--all")


def storage() -> Path:
    """Where the layers lie."""
    return paths.images() / "storage"


def reference(name: str) -> str:
    """An image in this storage, as other tools of the family (skopeo) call it."""
    return f"containers-storage:[overlay@{storage()}+{RUN}]{name}"


def _program() -> list[str | Path]:
    return ["buildah", "--root", storage(), "--runroot", RUN]
