from pathlib import Path

import pytest

from tests.unit.dev.support.programs import Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """No program is on the PATH but those that the test adds, and the cache is empty."""
    found = Programs(tmp_path)
    monkeypatch.setenv("PATH", str(found.folder))
    monkeypatch.setenv("PSEUDOREAL_CACHE", str(tmp_path / "cache"))
    for name in ("KUBECONFIG", "KUBE_CONTEXT", "OPERATOR_IMAGE", "TRAINER_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return found
