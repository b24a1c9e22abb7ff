"""One version: pyproject.toml states it, and everything else follows."""

from pathlib import Path

import pytest
from packaging.version import Version
from pseudoreal_dev import generated
from pseudoreal_dev.machine import paths, version
from pseudoreal_dev.machine.errors import DevError


@pytest.mark.parametrize(
    ("stated", "semantic"),
    [
        ("0.4.0", "0.4.0"),
        ("0.4.0.dev0", "0.4.0-dev.0"),
        ("0.4.0rc1", "0.4.0-rc.1"),
        ("1.0.0rc2.dev3", "1.0.0-rc.2.dev.3"),
    ],
)
def test_charts_and_images_have_semantic_versions(stated: str, semantic: str) -> None:
    assert version.semantic(Version(stated)) == semantic


def test_charts_and_documents_state_the_version_of_the_project() -> None:
    stamped = dict(version.stamped())
    assert {path.relative_to(paths.REPOSITORY).as_posix() for path in stamped} >= {
        "charts/pseudoreal/Chart.yaml",
        "charts/pseudoreal-llama/Chart.yaml",
        "Dockerfile",
        "README.md",
        "docs/llama.md",
    }
    for path, text in stamped.items():
        assert path.read_text() == text, f"{path} states another version than pyproject.toml; run `make generate`"


def test_another_version_is_written_everywhere(tmp_path: Path) -> None:
    (tmp_path / "charts" / "one").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "2.0.0.dev1"\n')
    (tmp_path / "charts" / "one" / "Chart.yaml").write_text("version: 1.0.0\nappVersion: 1.0.0\nkubeVersion: 1.30\n")
    (tmp_path / "Dockerfile").write_text("ARG VERSION=1.0.0\nARG VERSION\n")
    (tmp_path / "README.md").write_text(
        "This is 1.0.0; [what upgrades](x).\ndocker push REGISTRY/pseudoreal-operator:1.0.0 && helm\n"
        "localhost/pseudoreal-operator:1\n"
    )
    (tmp_path / "CHANGELOG.md").write_text("docker push REGISTRY/pseudoreal-operator:1.0.0\n")
    version.write(tmp_path)
    assert (tmp_path / "charts" / "one" / "Chart.yaml").read_text() == (
        "version: 2.0.0-dev.1\nappVersion: 2.0.0-dev.1\nkubeVersion: 1.30\n"
    )
    assert (tmp_path / "Dockerfile").read_text() == "ARG VERSION=2.0.0-dev.1\nARG VERSION\n"
    assert (tmp_path / "README.md").read_text() == (
        "This is 2.0 under development; [what upgrades](x).\n"
        "docker push REGISTRY/pseudoreal-operator:2.0.0-dev.1 && helm\nlocalhost/pseudoreal-operator:1\n"
    )
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "2.0.0"\n')
    version.write(tmp_path)
    assert (tmp_path / "README.md").read_text().startswith("This is 2.0.0; [what upgrades](x).\n")
    assert "1.0.0" in (tmp_path / "CHANGELOG.md").read_text(), "what was, stays"


def test_a_file_with_another_version_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "read", lambda *_: Version("9.9.9"))
    with pytest.raises(DevError, match=r"charts/pseudoreal/Chart\.yaml.*run `make generate`"):
        generated.check()
