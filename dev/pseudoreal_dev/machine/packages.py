"""Debian packages needed by the tooling, installed if their programs are missing."""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.lock import exclusive
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
"""Program or header file -> its Debian package, for compiling a Python extension."""
# Root's PATH may lack the sbin folders.
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing(programs: Mapping[str, str] = PROGRAMS) -> list[str]:
    """Return the packages of the missing programs, in alphabetical order."""
    return sorted({package for program, package in programs.items() if not _is_there(program)})


def install_missing(programs: Mapping[str, str] = PROGRAMS) -> None:
    """Install the `missing` packages with apt-get. No package is removed: a conflict with an installed one is an
    error. Raises DevError."""
    if not (packages := missing(programs)):
        return
    if shutil.which("apt-get") is None:
        names = ", ".join(packages)
        raise DevError(f"{names} are missing, and there is no apt-get to install them. Install {names}")
    log = paths.logs() / "apt.log"
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress.step(f"installing {', '.join(packages)}", cost=Cost.FIRST_RUN, log=log):
        shell.run(["apt-get", "update"], log, environment=quiet)
        options = ["--yes", "--no-install-recommends", "--no-remove"]
        shell.run(["apt-get", "install", *options, *packages], log, environment=quiet)


def unpacked(package: str) -> Path:
    """Return a folder with the files of a package. The package is unpacked, not installed, so that no service
    starts."""
    folder = paths.packages() / package
    with exclusive("packages"):
        if not folder.exists():
            log = paths.logs() / "apt.log"
            folder.parent.mkdir(parents=True, exist_ok=True)
            with progress.step(f"fetching {package}", cost=Cost.FIRST_RUN, log=log), TemporaryDirectory() as place:
                shell.run(["apt-get", "update"], log)
                # If root runs apt-get, apt-get downloads as the user _apt: that user must be able to write here.
                Path(place).chmod(0o777)
                shell.run(["apt-get", "download", package], log, cwd=Path(place))
                (archive,) = Path(place).glob("*.deb")
                partial = folder.with_name(f".{package}.partial")
                shell.run(["dpkg-deb", "--extract", archive, partial], log)
                partial.rename(folder)
    return folder


def _is_there(program: str) -> bool:
    return Path(program).exists() if program.startswith("/") else shutil.which(program, path=SEARCH) is not None
