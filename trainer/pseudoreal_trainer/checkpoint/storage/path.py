"""Names of what is stored: paths of a file system, and URLs of objects."""

from dataclasses import dataclass
from pathlib import Path

SCHEME = "s3://"


@dataclass(frozen=True)
class ObjectPath:
    """A name in object storage, with as much of pathlib's interface as naming things needs. Object storage has no
    folders, only names that begin alike; they are called folders all the same."""

    url: str
    """The URL, without a slash at its end."""

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.url.rpartition("/")[0])


StoragePath = Path | ObjectPath


def storage_path(text: str) -> StoragePath:
    return ObjectPath(text.rstrip("/")) if text.startswith(SCHEME) else Path(text)
