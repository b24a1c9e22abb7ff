"""Owner of the files that root writes into a checkout."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from pseudoreal_dev.machine import paths


def give_back(folder: Path = paths.REPOSITORY) -> None:
    """Give the files below `folder` that belong to root to the owner of `folder`, if this process is root.

    `sudo make demo` writes into .venv and pseudoreal-runs; `make run` without sudo must be able to go on there.
    """
    owner = folder.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    # By descriptor: the owner could put a link to a folder of root in place of a folder meanwhile.
    for _, folders, files, place in os.fwalk(folder):
        for name in (*folders, *files):
            with suppress(OSError):  # the file may be gone, or on a file system without owners
                found = os.stat(name, dir_fd=place, follow_symlinks=False)
                # uv links files from its cache, which stays root's; who owns the folder can replace such a file.
                is_shared = not stat.S_ISDIR(found.st_mode) and found.st_nlink > 1
                if found.st_uid == 0 and not is_shared:
                    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=place, follow_symlinks=False)
