"""Programs of the cluster, built from one Go module into the cache."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import go, paths
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
VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Binaries:
    """Folder with the built programs."""

    folder: Path

    def path(self, name: str) -> Path:
        assert name in PACKAGES, f"PACKAGES names {name}, as every program of the cluster"
        return self.folder / name


def build() -> Binaries:
    """Build the missing programs. Each program is published as soon as it is built, so an interrupted build can
    resume."""
    binaries = Binaries(_folder())
    with exclusive("binaries"):
        missing = [name for name in PACKAGES if not binaries.path(name).exists()]
        if missing:
            binaries.folder.mkdir(parents=True, exist_ok=True)
            with progress.step("building the cluster's programs", cost=Cost.FIRST_RUN):
                go.download(paths.TOOLS, list(PACKAGES.values()))
                for name in missing:
                    go.build(paths.TOOLS, PACKAGES[name], binaries.path(name), linker_flags=_linker_flags())
    return binaries


def are_cached() -> bool:
    """Return whether `build` would have nothing to do."""
    return all((_folder() / name).exists() for name in PACKAGES)


def required_go() -> str:
    """Return the oldest Go version able to build the tools module."""
    return _find(r"^go (\S+)$")


def _folder() -> Path:
    return go.folder_of(paths.TOOLS, ["pause/*.go"])


def _linker_flags() -> str:
    # Without these flags the servers report v0.0.0-master, and clients that check versions refuse them.
    version = _find(r"^\s*k8s\.io/kubernetes (v\S+)$")
    major, minor, _ = version.removeprefix("v").split(".")
    facts = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join([go.STRIPPED, *(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in facts.items())])


def _find(pattern: str) -> str:
    found = re.search(pattern, (paths.TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert found, f"dev/tools/go.mod has a line that matches {pattern}"
    return found.group(1)
