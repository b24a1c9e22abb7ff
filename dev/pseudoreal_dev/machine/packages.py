"""The Debian packages that the tooling needs, installed when their programs are missing."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.progress import Cost, progress

PROGRAMS: Mapping[str, str] = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "umount": "mount",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ethtool": "ethtool",
    "modprobe": "kmod",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
}
COMPILER: Mapping[str, str] = {"g++": "g++", f"{sysconfig.get_path('include')}/Python.h": "python3-dev"}
"""What compiles an extension of Python."""
# Root's PATH may lack the folders of the administrator's programs.
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing(programs: Mapping[str, str] = PROGRAMS) -> list[str]:
    """The packages whose programs are not on this machine, in alphabetical order."""
    return sorted({package for program, package in programs.items() if not _is_there(program)})


def install_missing(programs: Mapping[str, str] = PROGRAMS) -> None:
    """Installs `missing` with apt-get. Removes nothing: a package that conflicts with an installed one is an error."""
    if not (packages := missing(programs)):
        return
    log = paths.logs() / "apt.log"
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"installing {', '.join(packages)}", cost=Cost.FIRST_RUN, log=log):
        shell.run(["apt-get", "update"], log, environment=quiet)
        options = ["--yes", "--no-install-recommends", "--no-remove"]
        shell.run(["apt-get", "install", *options, *packages], log, environment=quiet)


def _is_there(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else shutil.which(program, path=SEARCH) is not None
