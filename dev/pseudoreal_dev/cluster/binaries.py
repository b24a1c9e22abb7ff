"""Programs of the cluster, built from Go modules into the cache, or from a folder that the user names."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pseudoreal_dev.machine import go, paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.lock import exclusive
from pseudoreal_dev.machine.progress import Cost, progress

PACKAGES: Mapping[str, str] = {
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "coredns": "github.com/coredns/coredns",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "pause": "./pause",
}
EXISTING = "PSEUDOREAL_BINARIES"
"""Environment variable: a folder whose programs are used instead of building them."""
OF_A_MINOR = ("kube-apiserver", "kube-controller-manager")
"""Programs that the modules of other minor versions have: controllers must not be newer than their API server."""
VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Binaries:
    """Folder with the built programs, and paths of the programs that are elsewhere."""

    folder: Path
    elsewhere: Mapping[str, Path] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        assert name in PACKAGES, f"PACKAGES names {name}, as every program of the cluster"
        return self.elsewhere.get(name, self.folder / name)


def build(*names: str, kubernetes: str | None = None) -> Binaries:
    """Build the missing programs among `names`; without names, all missing programs.

    `kubernetes` is the minor version of the API server and the controllers, if the other programs have another one.
    Each program is published as soon as it is built, so an interrupted build can resume. Raises DevError.
    """
    binaries = Binaries(_folder(), _existing() | _of_a_minor(kubernetes))
    # Without the lock: while a run builds programs for minutes, others go on with those that are there.
    if _missing(binaries, names):
        with exclusive("binaries"):
            missing = _missing(binaries, names)
            _require_go(missing)
            with progress.step("building the cluster's programs", cost=Cost.FIRST_RUN):
                own = [name for name in missing if name in OF_A_MINOR and kubernetes]
                _build([name for name in missing if name not in own], binaries, None)
                _build(own, binaries, kubernetes)
    return binaries


def are_cached() -> bool:
    """Return whether `build` would have nothing to do."""
    binaries = Binaries(_folder(), _existing())
    return all(binaries.path(name).exists() for name in PACKAGES)


def required_go() -> str:
    """Return the oldest Go version able to build the tools module."""
    return _find(paths.TOOLS, r"^go (\S+)$")


def minors() -> list[str]:
    """Return the minor versions of Kubernetes with a module of their own, the oldest first."""
    found = [folder.name.removeprefix("kubernetes-") for folder in paths.TOOLS.glob("kubernetes-*")]
    return sorted(found, key=lambda minor: [int(number) for number in minor.split(".")])


def version(kubernetes: str | None = None) -> str:
    """Return the version of Kubernetes that the tools module, or the module of a minor version, pins: "v1.34.4"."""
    return _find(_module(kubernetes), r"^(?:require )?\s*k8s\.io/kubernetes (v\S+)$")


def _missing(binaries: Binaries, names: Sequence[str]) -> list[str]:
    return [name for name in names or PACKAGES if not binaries.path(name).exists()]


def _build(names: list[str], binaries: Binaries, kubernetes: str | None) -> None:
    """Build programs from the tools module, or from the module of a minor version."""
    if names:
        go.download(_module(kubernetes), [PACKAGES[name] for name in names])
    for name in names:
        binaries.path(name).parent.mkdir(parents=True, exist_ok=True)
        flags = _linker_flags(version(kubernetes))
        go.build(_module(kubernetes), PACKAGES[name], binaries.path(name), linker_flags=flags)


def _folder() -> Path:
    return go.folder_of(paths.TOOLS, ["pause/*.go"])


def _module(kubernetes: str | None) -> Path:
    return paths.TOOLS / f"kubernetes-{kubernetes}" if kubernetes else paths.TOOLS


def _existing() -> dict[str, Path]:
    """Return the programs in the user's folder. Raises DevError if there are none."""
    given = os.environ.get(EXISTING)
    if not given:
        return {}
    found = {name: Path(given).resolve() / name for name in PACKAGES if os.access(Path(given) / name, os.X_OK)}
    if not found:
        raise DevError(
            f"{EXISTING}={given} has none of the programs {', '.join(PACKAGES)}. Name a folder in which some of them"
            " lie as executable files, or unset it to have all of them built"
        )
    return found


def _of_a_minor(kubernetes: str | None) -> dict[str, Path]:
    if kubernetes is None:
        return {}
    if kubernetes not in minors():
        raise DevError(f"dev/tools has no API server of Kubernetes {kubernetes}, only of {', '.join(minors())}")
    return {name: go.folder_of(_module(kubernetes)) / name for name in OF_A_MINOR}


def _require_go(missing: list[str]) -> None:
    if shutil.which("go") is None:
        raise DevError(
            f"Go is missing, with which {', '.join(missing)} would be built. Install Go {required_go()} or newer, or"
            f" set {EXISTING} to a folder that has these programs"
        )


def _linker_flags(kubernetes: str) -> str:
    # Without these flags the servers report v0.0.0-master, and clients that check versions refuse them.
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    facts = {"gitVersion": kubernetes, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join([go.STRIPPED, *(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in facts.items())])


def _find(module: Path, pattern: str) -> str:
    found = re.search(pattern, (module / "go.mod").read_text(), re.MULTILINE)
    assert found, f"the go.mod in {module} has a line that matches {pattern}"
    return found.group(1)
