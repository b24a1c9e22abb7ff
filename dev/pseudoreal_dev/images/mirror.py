"""The package archive of the machine's own distribution, Debian or Ubuntu, from which the images' base is built."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import Missing, Problem
from pseudoreal_dev.machine.progress import Cost, progress

OLDEST_PYTHON = (3, 11)
# Ubuntu has python3-venv, a compiler's parts and the quickstart's text in universe.
COMPONENTS = {"Debian": ("main",), "Ubuntu": ("main", "universe")}
# Schemes that debootstrap reads; apt has more, for instance mirror+file.
_SCHEMES = re.compile(r"(https?://|file:)")
# Suites that only add to another one. On Debian their code names say so as well, on Ubuntu only their suites.
_ADDITION = re.compile(r"-(updates|security|backports(-sloppy)?|proposed(-updates)?)$")
_FORM = "$(ORIGIN)|$(SUITE)|$(CODENAME)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)"


@dataclass(frozen=True)
class Mirror:
    """`suite`: code name of the release; `uri`: of the archive, as in apt's sources."""

    origin: str
    suite: str
    uri: str

    @property
    def components(self) -> tuple[str, ...]:
        return COMPONENTS[self.origin]


@dataclass(frozen=True)
class _Archive:
    """A suite of an archive. `release`: its name in apt's sources, for instance stable."""

    origin: str
    codename: str
    release: str
    uri: str

    def python(self, versions: str) -> str:
        """Return the version of python3 from the output of `apt-cache madison python3`; "" if there is none."""
        for line in versions.splitlines():
            _, version, place = (field.strip() for field in line.split("|"))
            if place.split()[:2] == [self.uri.rstrip("/"), f"{self.release}/main"]:
                return version
        return ""


def find() -> Mirror:
    """Return the mirror that apt knows; root fetches apt's lists first, if there are none. Raises Missing."""
    if shutil.which("apt-get") is None:
        raise Missing(
            Problem("there is no apt-get, which knows an archive for the images' base", "Use Debian or Ubuntu")
        )
    if not has_lists() and os.geteuid() == 0:
        log = paths.logs() / "apt.log"
        try:
            with progress.step("fetching apt's lists of packages", cost=Cost.FIRST_RUN, log=log):
                shell.run(["apt-get", "update"], log)
        except shell.CommandFailed as error:
            remedy = f"Read {log}, and mend apt's sources or the network"
            raise Missing(
                Problem("`apt-get update` fails, so no archive for the images' base is known", remedy)
            ) from error
    return find_mirror(_index_targets(), shell.output(["apt-cache", "madison", "python3"]), _codename())


def has_lists() -> bool:
    """Return whether apt has fetched lists of what its sources offer."""
    return bool(_index_targets().strip())


def find_mirror(index_targets: str, versions: str, codename: str) -> Mirror:
    """Return the first archive with a python3 that is new enough; the archive of the release `codename` comes first.

    `index_targets`: lines of ORIGIN|SUITE|CODENAME|RELEASE|COMPONENT|URI. `versions`: the output of
    `apt-cache madison python3`. Raises Missing, with the reason, if there is none.
    """
    archives = list(dict.fromkeys(_archives(index_targets)))
    if not archives:
        reason = "apt knows no archive of Debian or Ubuntu, by http, https or file, for the images' base"
        raise Missing(Problem(reason, "Add the archive of this release to /etc/apt/sources.list.d"))
    archives.sort(key=lambda archive: archive.codename != codename)
    for archive in archives:
        if _numbers(archive.python(versions)) >= OLDEST_PYTHON:
            return Mirror(archive.origin, archive.codename, archive.uri)
    first = archives[0]
    found = first.python(versions)
    has = f"has Python {'.'.join(map(str, _numbers(found)))}" if found else "has no python3 in apt's lists"
    oldest = ".".join(map(str, OLDEST_PYTHON))
    reason = f"{first.origin} {first.codename} {has}, and the images need {oldest} or newer"
    raise Missing(Problem(reason, "Use Debian 12, Ubuntu 24.04 or newer"))


def _archives(index_targets: str) -> Iterator[_Archive]:
    for line in index_targets.splitlines():
        origin, suite, codename, release, component, uri = line.split("|", maxsplit=5)
        adds = any(_ADDITION.search(name) for name in (suite, codename, release))
        if origin in COMPONENTS and component == "main" and not adds and _SCHEMES.match(uri):
            yield _Archive(origin, codename, release, uri)


def _index_targets() -> str:
    return shell.output(["apt-get", "indextargets", "--format", _FORM, "Created-By: Packages"])


def _codename() -> str:
    """Return the code name of the machine's release; "" if it has none."""
    release = Path("/etc/os-release")
    found = re.search(r'^VERSION_CODENAME="?(\w+)', release.read_text(), re.MULTILINE) if release.exists() else None
    return found.group(1) if found else ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor of a package's version; () if it has none."""
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
