"""The base of the images comes from the machine's own distribution, else from Docker, or is refused with a reason."""

import shutil
from pathlib import Path

import pytest
from pseudoreal_dev.images import base_image, mirror, pin
from pseudoreal_dev.images.mirror import Mirror, find_mirror
from pseudoreal_dev.machine import packages, paths
from pseudoreal_dev.machine.errors import DevError, Missing

from tests.unit.dev.support import apt, fakes
from tests.unit.dev.support.programs import Programs

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is not on this machine")
TOO_OLD = "Ubuntu jammy has Python 3.10, and the images need 3.11 or newer. Use Debian 12, Ubuntu 24.04 or newer"


@pytest.fixture(params=["deb822", "one-line"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use_machine(name: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let apt read sources and lists as on a machine of `apt.MACHINES`."""
    architecture = "arm64" if name.endswith("-arm") else "amd64"
    monkeypatch.setenv("APT_CONFIG", str(apt.write(folder, apt.MACHINES[name], form, architecture)))


@needs_apt
@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        ("debian-12", Mirror("Debian", "bookworm", apt.DEBIAN)),
        ("debian-13", Mirror("Debian", "trixie", apt.DEBIAN)),
        ("ubuntu-24.04", Mirror("Ubuntu", "noble", apt.UBUNTU)),
        ("ubuntu-24.04-arm", Mirror("Ubuntu", "noble", apt.PORTS)),
    ],
)
def test_the_mirror_is_the_releases_own_archive(
    machine: str, wanted: Mirror, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its updates, its security fixes or somebody else's repository. apt itself reads the sources."""
    use_machine(machine, form, tmp_path, monkeypatch)
    assert mirror.find() == wanted


@needs_apt
def test_a_release_with_an_old_python_is_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine("ubuntu-22.04", form, tmp_path, monkeypatch)
    with pytest.raises(Missing) as refused:
        mirror.find()
    assert str(refused.value) == TOO_OLD


def test_the_machines_own_release_comes_before_others() -> None:
    targets = "Debian|unstable|sid|sid|main|http://a/\nDebian|stable|trixie|trixie|main|http://a/"
    versions = (
        "python3 | 3.14.1-1 | http://a sid/main all Packages\npython3 | 3.13.5-1 | http://a trixie/main all Packages"
    )
    assert find_mirror(targets, versions, "trixie").suite == "trixie"
    assert find_mirror(targets, versions.replace("3.13.5", "3.9.2"), "trixie").suite == "sid"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "LP-PPA-x|noble|noble|noble|main|http://a/",
        "Ubuntu|noble-updates|noble|noble-updates|main|http://a/",
        "Debian|stable-updates|trixie-updates|trixie-updates|main|http://a/",
        "Ubuntu|noble|noble|noble|main|mirror+file:/etc/apt/mirrors.txt",
        "Debian|stable|trixie|trixie|main|cdrom:[Debian 13]/",
    ],
)
def test_without_an_archive_that_can_be_read_there_is_no_mirror(line: str) -> None:
    with pytest.raises(Missing, match=r"apt knows no archive .* Add the archive of this release to /etc/apt"):
        find_mirror(line, "python3 | 3.12.3 | http://a noble/main amd64 Packages", "noble")


def test_a_suite_by_another_name_is_known_by_its_code_name() -> None:
    versions = "python3 | 3.13.5-1 | http://a stable/main all Packages"
    found = find_mirror("Debian|stable|trixie|stable|main|http://a/", versions, "")
    assert found == Mirror("Debian", "trixie", "http://a/")


def test_ubuntus_base_has_universe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """python3-venv is there. A suite that debootstrap does not know yet is unpacked like the last one."""
    monkeypatch.setattr(base_image, "SCRIPTS", tmp_path)
    (tmp_path / "noble").touch()
    known = base_image.debootstrap(Mirror("Ubuntu", "noble", apt.UBUNTU), Path("/r"))
    assert "--components=main,universe" in known
    assert known[-3:] == ["noble", Path("/r"), apt.UBUNTU]
    unknown = base_image.debootstrap(Mirror("Ubuntu", "zesty", apt.UBUNTU), Path("/r"))
    assert unknown[-1] == tmp_path / "gutsy"
    debian = base_image.debootstrap(Mirror("Debian", "trixie", apt.DEBIAN), Path("/r"))
    assert "--components=main" in debian
    assert debian[-1] == tmp_path / "sid"


@pytest.fixture
def old_ubuntu(programs: Programs) -> Programs:
    programs.add("apt-get", {"indextargets*": "echo 'Ubuntu|jammy|jammy|jammy|main|http://a/'"})
    programs.add("apt-cache", {"*": "echo 'python3 | 3.10.4-0ubuntu2 | http://a jammy/main amd64 Packages'"})
    return programs


def test_the_old_python_is_told_before_anything_is_built(old_ubuntu: Programs) -> None:
    (problem,) = base_image.problems()
    assert str(problem) == f"{TOO_OLD}; or have the base taken from an image: docker is not on the PATH. Install Docker"
    assert [call for call in old_ubuntu.calls() if "indextargets" not in call and "madison" not in call] == []


def test_with_docker_the_distribution_does_not_matter(old_ubuntu: Programs) -> None:
    old_ubuntu.add("docker", {"info*": f"echo '{fakes.DAEMON}'"})
    assert base_image.problems() == []


def test_a_base_that_is_built_is_taken_whatever_apt_says(old_ubuntu: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    name = "localhost/pseudoreal-base:bookworm-7b790065"
    old_ubuntu.add("buildah", {"*images*": f"echo localhost/other:x; echo {name}"})
    assert base_image.problems() == []
    assert base_image.build() == name
    assert old_ubuntu.calls("apt-get") == []


def test_buildahs_storage_is_read_by_root_alone(old_ubuntu: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """buildah refuses others, who must hear what the demo lacks and not what buildah says."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    old_ubuntu.add("buildah", {"*": "echo 'mkdir /run/pseudoreal: permission denied' >&2; exit 125"})
    (problem,) = base_image.problems()
    assert str(problem).startswith(TOO_OLD)
    assert old_ubuntu.calls("buildah") == []


def test_without_apt_missing_programs_are_named(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "SEARCH", str(programs.folder))
    programs.add("buildah", {})
    needed = {"buildah": "buildah", "skopeo": "skopeo", "debootstrap": "debootstrap"}
    with pytest.raises(DevError, match=r"debootstrap, skopeo are missing, and there is no apt-get to install them"):
        packages.install_missing(needed)


def test_the_base_is_fetched_by_docker(old_ubuntu: Programs) -> None:
    """By the digest in the Dockerfile, and without a copy that stays."""
    old_ubuntu.add("docker", {"info*": f"echo '{fakes.DAEMON}'", "image save*": ': > "$4"'})
    old_ubuntu.add("buildah", {})
    old_ubuntu.add("skopeo", {})
    name = base_image.build()
    image, digest = pin.pinned(pin.DOCKERFILE.read_text())
    assert name == f"localhost/pseudoreal-base:docker-{digest[7:19]}"
    assert f"docker pull --quiet {image}@{digest}" in old_ubuntu.calls("docker")
    (copy,) = old_ubuntu.calls("skopeo")
    assert copy.endswith(name)
    assert not Path(copy.split("docker-archive:")[1].split()[0]).exists()


def test_without_apt_only_docker_has_a_base(programs: Programs) -> None:
    (problem,) = base_image.problems()
    assert str(problem) == (
        "there is no apt-get, which knows an archive for the images' base. Use Debian or Ubuntu; or have the base taken"
        " from an image: docker is not on the PATH. Install Docker"
    )
    programs.add("docker", {"info*": f"echo '{fakes.DAEMON}'"})
    assert base_image.problems() == []


def test_the_lists_are_fetched_where_there_are_none(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a new machine apt knows nothing yet. Only root can fetch the lists: others hear that root is needed."""
    targets = '[ -e "$STATE/lists" ] && echo "Debian|stable|trixie|trixie|main|http://a/" || :'
    programs.add("apt-get", {"update*": ': > "$STATE/lists"', "indextargets*": targets})
    programs.add("apt-cache", {"*": "echo 'python3 | 3.13.5-1 | http://a trixie/main amd64 Packages'"})
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert base_image.problems() == []
    assert "apt-get update" not in programs.calls()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert base_image.problems() == []
    assert "apt-get update" in programs.calls()


def test_lists_that_cannot_be_fetched_are_a_problem_unless_docker_has_a_base(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a key of somebody else's repository has expired."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    programs.add("apt-get", {"update*": "echo 'E: The repository is not signed.' >&2; exit 100"})
    (problem,) = base_image.problems()
    assert problem.missing == "`apt-get update` fails, so no archive for the images' base is known"
    assert f"Read {paths.logs()}/apt.log, and mend apt's sources" in problem.remedy
    assert "not signed" in (paths.logs() / "apt.log").read_text()
    programs.add("docker", {"info*": f"echo '{fakes.DAEMON}'"})
    assert base_image.problems() == []
