"""Servers that stand for the object storage of three clouds, started once, and a bucket on one of them."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from azure.storage.blob import BlobServiceClient
from pseudoreal_dev.neighbours import clouds
from pseudoreal_trainer.checkpoint.store import CheckpointStore

from tests.support.ports import free_port
from tests.unit.trainer.conftest import config, corpus_folder, delink_of, job_body, train, train_job
from tests.unit.trainer.storage.support import object_server
from tests.unit.trainer.storage.support.object_server import endpoint, store_of

__all__ = ["config", "corpus_folder", "delink_of", "endpoint", "job_body", "train", "train_job"]

_numbers = count()
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's account, which its documents name."""


class Bucket(Protocol):
    """A bucket, reached by a client other than the one under test."""

    @property
    def url(self) -> str: ...

    def found(self) -> list[str]:
        """Return the keys below the prefix."""

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, content: bytes) -> None: ...

    def remove(self, key: str) -> None: ...

    def delete(self) -> None:
        """Delete the bucket, with its contents."""


class _S3Bucket(object_server.Bucket):
    def delete(self) -> None:
        for key in self.found():
            self.remove(key)
        self.client.delete_bucket(Bucket=self.name)


class _GoogleBucket:
    def __init__(self, address: str, name: str) -> None:
        self.url, self._address, self._name = f"gs://{name}/prefix", address, name
        self._ask("POST", "storage/v1/b", b'{"name": "%s"}' % name.encode())

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        with urlopen(Request(f"{self._address}/{path}", content, method=method)) as answer:
            found: bytes = answer.read()
            return found

    def _objects(self) -> list[str]:
        listed = json.loads(self._ask("GET", f"storage/v1/b/{self._name}/o"))
        return [each["name"] for each in listed.get("items", [])]

    def found(self) -> list[str]:
        return [name.removeprefix("prefix/") for name in self._objects()]

    def read(self, key: str) -> bytes:
        return self._ask("GET", f"storage/v1/b/{self._name}/o/{quote(f'prefix/{key}', safe='')}?alt=media")

    def write(self, key: str, content: bytes) -> None:
        name = quote(f"prefix/{key}", safe="")
        self._ask("POST", f"upload/storage/v1/b/{self._name}/o?uploadType=media&name={name}", content)

    def remove(self, key: str) -> None:
        self._ask("DELETE", f"storage/v1/b/{self._name}/o/{quote(f'prefix/{key}', safe='')}")

    def delete(self) -> None:
        for key in self.found():
            self.remove(key)
        self._ask("DELETE", f"storage/v1/b/{self._name}")


class _AzureBucket:
    def __init__(self, connection: str, name: str) -> None:
        self.url = f"az://{name}/prefix"
        self._container = BlobServiceClient.from_connection_string(connection).create_container(name)

    def found(self) -> list[str]:
        return [name.removeprefix("prefix/") for name in self._container.list_blob_names()]

    def read(self, key: str) -> bytes:
        content: bytes = self._container.download_blob(f"prefix/{key}").readall()
        return content

    def write(self, key: str, content: bytes) -> None:
        self._container.upload_blob(f"prefix/{key}", content, overwrite=True)

    def remove(self, key: str) -> None:
        self._container.delete_blob(f"prefix/{key}")

    def delete(self) -> None:
        self._container.delete_container()


@contextmanager
def _running(command: list[str | Path], answers: Callable[[], Any], log: Path) -> Iterator[None]:
    """Run a server until the end of the context. `answers` raises OSError while it does not answer."""
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent) as process:
        try:
            _await(process, answers, log)
            yield
        finally:
            process.terminate()


def _await(process: subprocess.Popen[bytes], answers: Callable[[], Any], log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            answers()
            return
        except OSError:
            is_coming = process.poll() is None and time.monotonic() < end
            assert is_coming, log.read_text()
            time.sleep(0.05)


def _needs(program: str) -> None:
    """Skip the test on a machine without the program. CI has it."""
    if shutil.which(program) is None:
        assert "CI" not in os.environ, f"CI has {program}"
        pytest.skip(f"{program} is not installed, which the server that stands for this cloud needs")


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that stands for Google's object storage."""
    _needs("go")
    port, log = free_port(), tmp_path_factory.mktemp("google") / "log"
    address = f"http://127.0.0.1:{port}"
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    names = ["-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    answers = lambda: urlopen(f"{address}/storage/v1/b?project=any").close()  # noqa: E731
    with _running([clouds.fake_gcs_server(), *options, *names], answers, log):
        yield address


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Connection string of a server that stands for Azure's object storage."""
    _needs("node")
    _needs("npm")
    port, log = free_port(), tmp_path_factory.mktemp("azure") / "log"
    options = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    address = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    account = f"http://127.0.0.1:{port}/devstoreaccount1"
    connection = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={_KEY};BlobEndpoint={account};"

    def answers() -> None:
        try:
            BlobServiceClient.from_connection_string(connection, retry_total=0).get_service_properties()
        except Exception as error:
            raise OSError from error

    with _running(["node", clouds.azurite(), *options, *address], answers, log):
        yield connection


@pytest.fixture(params=["s3", "gs", "az"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket, with the environment that a user sets for its cloud."""
    name = f"bucket-{next(_numbers)}"
    match request.param:
        case "s3":
            object_server.use(request.getfixturevalue("endpoint"), monkeypatch)
            made = object_server.make_bucket()
            return _S3Bucket(made.client, made.name)
        case "gs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("google"))
            return _GoogleBucket(request.getfixturevalue("google"), name)
        case _:
            monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", request.getfixturevalue("azure"))
            return _AzureBucket(request.getfixturevalue("azure"), name)


@pytest.fixture
def remote(job_body: dict[str, Any], bucket: Bucket) -> Bucket:
    """The bucket, after pointing the job's checkpoints to it; a checkpoint is saved every second step."""
    storage = {"type": "ObjectStorage", "objectStorage": {"url": bucket.url}}
    job_body["spec"]["checkpoint"] = {"storage": storage, "everySteps": 2, "keepLast": 9}
    return bucket


@pytest.fixture
def store(remote: Bucket) -> CheckpointStore:
    return store_of(remote)
