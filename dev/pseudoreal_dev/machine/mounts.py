"""Mounts below a folder, and their removal."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.errors import DevError


def below(folder: Path, mountinfo: str) -> list[Path]:
    """Return the mount points below `folder`, innermost first, from the text of /proc/self/mountinfo."""
    points = [Path(_unescape(line.split()[4])) for line in mountinfo.splitlines()]
    # A later mount at the same place hides the earlier mount, so the later one is unmounted first.
    return [point for point in reversed(points) if point.is_relative_to(folder) and point != folder]


def unmount_below(folder: Path) -> None:
    """Unmount everything below `folder`, even mounts in use."""
    for point in below(folder, _mountinfo()):
        shell.succeeds(["umount", "--lazy", point])


def remove(paths: Iterable[Path]) -> None:
    """Remove folders and files. Raises DevError if something is still mounted below one of them: the mount may hold the
    user's data."""
    for path in paths:
        if mounted := below(path, _mountinfo()):
            raise DevError(f"{path} is not removed: {mounted[0]} is still mounted. Unmount it (umount {mounted[0]}).")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)
