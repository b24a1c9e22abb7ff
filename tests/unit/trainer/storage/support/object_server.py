"""An S3-compatible server, and access to its buckets by a client other than the one under test."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import pytest
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.storage.path import storage_path

UID = "11111111-2222"
FOLDER = "tiny-11111111"
"""The job's folder below the prefix."""
_numbers = count()


@dataclass(frozen=True)
class Bucket:
    client: Any
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/prefix"

    def found(self) -> list[str]:
        """Return the keys below the prefix."""
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [one["Key"].removeprefix("prefix/") for one in listed]

    def read(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=f"prefix/{key}")["Body"].read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=f"prefix/{key}", Body=content)

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"prefix/{key}")

    def unfinished(self) -> list[str]:
        """Return the keys of uploads that were started, and neither finished nor aborted."""
        listed = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [one["Key"].removeprefix("prefix/") for one in listed]

    def part_sizes(self) -> list[int]:
        """Return the sizes of the parts of the only unfinished upload."""
        (upload,) = self.client.list_multipart_uploads(Bucket=self.name)["Uploads"]
        listed = self.client.list_parts(Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"])
        return [part["Size"] for part in listed.get("Parts", [])]


@contextmanager
def serving() -> Iterator[str]:
    """Yield the URL of a running server."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


_endpoints: list[str] = []
"""The server known to the clients of this process, if any. Creating a client takes as long as many tests."""


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment as a user does, and drop cached clients of another server."""
    for name, value in _environment(endpoint).items():
        monkeypatch.setenv(name, value)
    if _endpoints != [endpoint]:
        forget_clients()
        _endpoints.append(endpoint)


def forget_clients() -> None:
    """Drop clients that were created for another environment."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    _endpoints.clear()


def _environment(endpoint: str) -> dict[str, str]:
    """Return the environment as set by a user."""
    keys = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something", "AWS_DEFAULT_REGION": "us-east-1"}
    nowhere = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"} | keys | nowhere


def make_bucket() -> Bucket:
    """Create a bucket on the server in the environment."""
    import boto3

    bucket = Bucket(boto3.client("s3"), f"bucket-{next(_numbers)}")
    bucket.client.create_bucket(Bucket=bucket.name)
    return bucket


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


def store_of(bucket: HasUrl) -> CheckpointStore:
    """Return the checkpoints of the job of `job_body`."""
    return CheckpointStore(storage_path(f"{bucket.url}/{FOLDER}"), UID)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    use(endpoint, monkeypatch)
    return make_bucket()
