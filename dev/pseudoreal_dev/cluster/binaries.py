"""The cluster's programs, built from one Go module into the cache."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.content_hash import hash_files
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
# A lazier garbage collector spends memory, of which there is enough, to save a part of the compiler's time.
BUILD = {"CGO_ENABLED": "0", "GOGC": "400"}
VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True)
class Binaries:
    """A folder of programs."""

    folder: Path

    def path(self, name: str) -> Path:
        assert name in PACKAGES, f"no program of the cluster is called {name}"
        return self.folder / name


def build() -> Binaries:
    """Builds what the cache lacks. An interrupted build goes on where it was: programs are published
    one by one."""
    binaries = Binaries(_folder())
    with exclusive("binaries"):
        missing = [name for name in PACKAGES if not binaries.path(name).exists()]
        if missing:
            binaries.folder.mkdir(parents=True, exist_ok=True)
            with progress.step("building the cluster's programs", cost=Cost.FIRST_RUN):
                _download()
                for name in missing:
                    _build(name, binaries.path(name))
    return binaries


def are_cached() -> bool:
    """Whether `build` would have nothing to do."""
    return all((_folder() / name).exists() for name in PACKAGES)


def required_go() -> str:
    """The oldest Go version that can build the tools module."""
    return _find(r"^go (\S+)$")


def _folder() -> Path:
    compiler = shell.output(["go", "version"])
    return paths.binaries() / hash_files(paths.TOOLS, ["*.mod", "*.sum", "pause/*.go"], [compiler])


def _download() -> None:
    log = paths.logs() / "go-mod-download.log"
    with progress.step("downloading Go modules", cost=Cost.FIRST_RUN, log=log):
        # Listing fetches just the modules that the programs need, and says which; `go mod download` fetches all.
        shell.run(["go", "list", "-deps", "-f", "", *PACKAGES.values()], log, environment=BUILD, cwd=paths.TOOLS)


def _build(name: str, target: Path) -> None:
    log = paths.logs() / f"build-{name}.log"
    partial = target.with_name(f".{name}.partial")
    # Whatever else runs is waited for: people, tests, images.
    command = [
        "nice",
        "go",
        "build",
        "-v",
        "-mod=readonly",
        "-trimpath",
        "-buildvcs=false",
        "-ldflags",
        _linker_flags(),
    ]
    with progress.step(f"building {name}", cost=Cost.FIRST_RUN, log=log):
        shell.run([*command, "-o", partial, PACKAGES[name]], log, environment=BUILD, cwd=paths.TOOLS)
        os.replace(partial, target)


def _linker_flags() -> str:
    # Without these the servers call themselves v0.0.0-master, and clients that check versions refuse them.
    version = _find(r"^\s*k8s\.io/kubernetes (v\S+)$")
    major, minor, _ = version.removeprefix("v").split(".")
    facts = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(["-s", "-w", *(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in facts.items())])


def _find(pattern: str) -> str:
    found = re.search(pattern, (paths.TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert found, f"dev/tools/go.mod has no line that matches {pattern}"
    return found.group(1)
