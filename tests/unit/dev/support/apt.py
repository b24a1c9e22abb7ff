"""A folder in which apt finds its sources and lists, as on machines of other distributions.

apt itself reads it, by the configuration that APT_CONFIG names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEBIAN, PORTS = "http://debian.example/debian/", "http://ports.example/ubuntu-ports/"
UBUNTU, UBUNTU_SECURITY = "http://ubuntu.example/ubuntu/", "http://security.example/ubuntu/"


@dataclass(frozen=True)
class Suite:
    """A suite of an archive. `release`: its name in the sources; `python`: version of python3 in main, "" for none."""

    uri: str
    release: str
    origin: str
    suite: str
    codename: str
    components: tuple[str, ...] = ("main",)
    python: str = ""


def _ubuntu(codename: str, python: str, updated: str, uri: str = UBUNTU) -> tuple[Suite, ...]:
    """The pockets in the order of Ubuntu's sources; all have the code name of the release."""
    security = UBUNTU_SECURITY if uri == UBUNTU else uri
    places = [(uri, "", python), (uri, "-updates", updated), (uri, "-backports", ""), (security, "-security", updated)]
    components = ("main", "restricted", "universe", "multiverse")
    return tuple(
        Suite(place, f"{codename}{pocket}", "Ubuntu", f"{codename}{pocket}", codename, components, version)
        for place, pocket, version in places
    )


def _debian(codename: str, suite: str, python: str) -> tuple[Suite, ...]:
    security = "http://debian.example/debian-security/"
    return (
        Suite(DEBIAN, codename, "Debian", suite, codename, ("main", "non-free-firmware"), python),
        Suite(DEBIAN, f"{codename}-updates", "Debian", f"{suite}-updates", f"{codename}-updates"),
        Suite(security, f"{codename}-security", "Debian", f"{suite}-security", f"{codename}-security"),
    )


# A repository of somebody else, with the release's own name and a python3: it is no base.
_PPA = Suite("https://ppa.example/x/ubuntu/", "jammy", "LP-PPA-x", "jammy", "jammy", python="3.13.1-1")
MACHINES: Mapping[str, tuple[Suite, ...]] = {
    "debian-12": _debian("bookworm", "oldstable", "3.11.2-1+b1"),
    "debian-13": _debian("trixie", "stable", "3.13.5-1"),
    "ubuntu-22.04": (_PPA, *_ubuntu("jammy", "3.10.4-0ubuntu2", "3.10.6-1~22.04.1")),
    "ubuntu-24.04": _ubuntu("noble", "3.12.3-0ubuntu2", "3.12.3-0ubuntu2.1"),
    "ubuntu-24.04-arm": _ubuntu("noble", "3.12.3-0ubuntu2", "3.12.3-0ubuntu2.1", PORTS),
}


def write(folder: Path, suites: tuple[Suite, ...], form: str, architecture: str) -> Path:
    """Write sources of the `form` deb822 or one-line, and their lists; return the file for APT_CONFIG."""
    for name in (
        "etc/sources.list.d",
        "etc/preferences.d",
        "etc/trusted.gpg.d",
        "lists/partial",
        "cache/archives/partial",
    ):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    if form == "deb822":
        text = "\n".join(
            f"Types: deb\nURIs: {one.uri}\nSuites: {one.release}\nComponents: {' '.join(one.components)}\n"
            for one in suites
        )
        (folder / "etc/sources.list.d/machine.sources").write_text(text)
    else:
        text = "\n".join(f"deb {one.uri} {one.release} {' '.join(one.components)}" for one in suites)
        (folder / "etc/sources.list").write_text(f"# See the handbook.\n{text}\n")
    for one in suites:
        _write_lists(folder / "lists", one, architecture)
    settings = {
        "Dir::Etc": f"{folder}/etc",
        "Dir::State::lists": f"{folder}/lists",
        "Dir::State::status": f"{folder}/status",
        "Dir::Cache": f"{folder}/cache",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
    }
    file = folder / "apt.conf"
    file.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return file


def _write_lists(lists: Path, suite: Suite, architecture: str) -> None:
    """Write what `apt-get update` fetches of a suite: its Release file, and the packages of each component."""
    place = suite.uri.partition("://")[2].strip("/").replace("/", "_") + f"_dists_{suite.release}"
    (lists / f"{place}_Release").write_text(
        f"Origin: {suite.origin}\nLabel: {suite.origin}\nSuite: {suite.suite}\nCodename: {suite.codename}\n"
        f"Date: Thu, 25 Apr 2024 15:10:33 UTC\nArchitectures: {architecture}\n"
        f"Components: {' '.join(suite.components)}\n"
    )
    for component in suite.components:
        python = suite.python if component == "main" else ""
        package = f"Package: python3\nArchitecture: {architecture}\nVersion: {python}\nFilename: x\nSize: 1\n\n"
        (lists / f"{place}_{component}_binary-{architecture}_Packages").write_text(package if python else "")
