"""buildah with its own storage, separate from all others on the machine."""

from collections.abc import Mapping
from pathlib import Path

from pseudoreal_dev.machine import mounts, paths, shell

ENVIRONMENT: Mapping[str, str] = {"STORAGE_DRIVER": "overlay", "BUILDAH_ISOLATION": "chroot"}
# On a tmpfs, because this state is invalid after a reboot.
RUN = Path("/run/pseudoreal/storage")


def run(*words: str | Path, log: Path) -> None:
    """Run a buildah command to its end. Raises CommandFailed with the end of the log."""
    shell.run([*_program(), *words], log, environment=ENVIRONMENT)


def output(*words: str | Path) -> str:
    """Return the output of a buildah command without the final newline."""
    return shell.output([*_program(), *words], environment=ENVIRONMENT).strip()


def images() -> list[str]:
    """Return NAME:TAG of each tagged image."""
    names = output("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split()
    return [name for name in names if "<none>" not in name]


def clear_leftovers() -> None:
    """Remove the working containers of interrupted builds."""
    mounts.unmount_below(storage())
    if output("containers", "--quiet"):
        output("rm", "--all")


def storage() -> Path:
    """Return the folder in which buildah stores images and working containers."""
    return paths.images() / "storage"


def reference(name: str) -> str:
    """Return the reference to an image in this storage for related tools (skopeo)."""
    return f"containers-storage:[overlay@{storage()}+{RUN}]{name}"


def _program() -> list[str | Path]:
    return ["buildah", "--root", storage(), "--runroot", RUN]
