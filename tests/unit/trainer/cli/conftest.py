from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.storage.support.object_server import bucket, endpoint

__all__ = ["bucket", "endpoint"]


@pytest.fixture
def job(job_body: dict[str, Any]) -> dict[str, Any]:
    """A small job whose corpus does not exist."""
    job_body["spec"]["data"]["path"] = "nowhere"
    job_body["spec"]["precision"] = {"compute": "bfloat16"}
    job_body["metadata"].pop("uid")
    return job_body


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.yaml"
