"""Where the programs of a control plane come from: built from Go modules, or from the folder in PSEUDOREAL_BINARIES."""

import re
from pathlib import Path

import pytest
import yaml
from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.cluster.control_plane import PROGRAMS
from pseudoreal_dev.machine import go, paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.lock import exclusive


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PSEUDOREAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(binaries.EXISTING, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Folders of modules and names of the programs that are built from them, as empty files."""
    found: list[tuple[str, str]] = []

    def build(module: Path, package: str, target: Path, *, linker_flags: str) -> None:
        assert package == binaries.PACKAGES[target.name]
        assert re.search(rf"version\.gitVersion={binaries.version(_minor(module))} ", linker_flags)
        found.append((module.name, target.name))
        target.touch()

    monkeypatch.setattr(go, "download", lambda *_: None)
    monkeypatch.setattr(go, "build", build)
    return found


def _minor(module: Path) -> str | None:
    return None if module == paths.TOOLS else module.name.removeprefix("kubernetes-")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with an API server and etcd, as setup-envtest leaves it."""
    made = tmp_path / "existing"
    made.mkdir()
    for name in ("kube-apiserver", "etcd"):
        (made / name).touch(mode=0o755)
    return made


def test_only_named_programs_are_built_and_once(built: list[tuple[str, str]]) -> None:
    found = binaries.build("etcd", "helm")
    assert built == [("tools", "etcd"), ("tools", "helm")]
    assert found.path("helm").exists()
    binaries.build("helm")
    assert len(built) == 2
    binaries.build()
    assert {name for _, name in built} == set(binaries.PACKAGES)
    assert binaries.are_cached()


def test_what_is_built_is_found_while_another_run_builds(built: list[tuple[str, str]]) -> None:
    binaries.build("kubectl")
    with exclusive("binaries"):
        binaries.build("kubectl")
    assert len(built) == 1


def test_programs_of_the_users_folder_are_not_built(
    built: list[tuple[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(binaries.EXISTING, str(folder))
    found = binaries.build("etcd", "kube-apiserver", "kubectl")
    assert built == [("tools", "kubectl")]
    assert found.path("etcd") == folder / "etcd"
    assert found.path("kubectl").parent == found.folder


def test_a_file_that_nobody_may_execute_is_no_program(
    built: list[tuple[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "etcd").chmod(0o644)
    monkeypatch.setenv(binaries.EXISTING, str(folder))
    assert binaries.build("etcd").path("etcd") != folder / "etcd"
    assert built == [("tools", "etcd")]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_programs_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(binaries.EXISTING, str(tmp_path / name))
    with pytest.raises(
        DevError, match=rf"PSEUDOREAL_BINARIES={tmp_path / name} has none of the programs kube-apiserver"
    ):
        binaries.build("etcd")


def test_without_go_existing_programs_are_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv(binaries.EXISTING, str(folder))
    assert binaries.build("etcd", "kube-apiserver").path("etcd") == folder / "etcd"
    with pytest.raises(DevError, match="Go is missing, with which kubectl would be built"):
        binaries.build("etcd", "kubectl")


@pytest.mark.parametrize("minor", binaries.minors())
class TestAnotherMinor:
    def test_its_api_server_and_controllers_are_built_beside_the_other_programs(
        self, minor: str, built: list[tuple[str, str]]
    ) -> None:
        found = binaries.build(*PROGRAMS, kubernetes=minor)
        own = f"kubernetes-{minor}"
        assert built == [("tools", "etcd"), (own, "kube-apiserver"), (own, "kube-controller-manager")]
        assert found.path("kube-apiserver") != binaries.build("kube-apiserver").path("kube-apiserver")

    def test_its_module_pins_one_version_of_kubernetes(self, minor: str) -> None:
        version = binaries.version(minor)
        assert version.startswith(f"v{minor}.")
        replaced = re.findall(
            r"=> k8s\.io/\S+ v0\.(\S+)$", (paths.TOOLS / f"kubernetes-{minor}/go.mod").read_text(), re.M
        )
        assert set(replaced) == {version.removeprefix("v1.")}

    def test_a_workflow_runs_the_tests_on_it(self, minor: str) -> None:
        workflow = yaml.safe_load((paths.REPOSITORY / ".github/workflows/ci.yml").read_text())
        assert minor in workflow["jobs"]["minors"]["strategy"]["matrix"]["kubernetes"]


def test_a_minor_without_a_module_is_refused_by_name() -> None:
    with pytest.raises(DevError, match=r"no API server of Kubernetes 1\.2, only of 1\.30, 1\.37"):
        binaries.build("etcd", kubernetes="1.2")


def test_the_oldest_minor_is_the_oldest_that_the_charts_accept() -> None:
    for chart in ("pseudoreal", "pseudoreal-llama"):
        accepted = yaml.safe_load((paths.REPOSITORY / "charts" / chart / "Chart.yaml").read_text())["kubeVersion"]
        assert accepted == f">={binaries.minors()[0]}.0-0"
