from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.checkpoint.store import CheckpointStore

from tests.unit.trainer.storage.support.object_server import UID, Bucket, bucket, endpoint, store_of

__all__ = ["bucket", "endpoint"]


@pytest.fixture
def remote(job_body: dict[str, Any], bucket: Bucket) -> Bucket:
    """The bucket, after pointing the job's checkpoints to it; a checkpoint is saved every second step."""
    storage = {"type": "ObjectStorage", "objectStorage": {"url": bucket.url}}
    job_body["spec"]["checkpoint"] = {"storage": storage, "everySteps": 2, "keepLast": 9}
    return bucket


@pytest.fixture(params=["files", "objects"])
def store(request: pytest.FixtureRequest, job_body: dict[str, Any], tmp_path: Path) -> CheckpointStore:
    """The job's checkpoints on either storage, saved every second step."""
    if request.param == "objects":
        return store_of(request.getfixturevalue("remote"))
    job_body["spec"]["checkpoint"]["everySteps"] = 2
    return CheckpointStore(tmp_path / "work", UID)
