"""Names of stored files: file system paths and object URLs."""

from dataclasses import dataclass
from pathlib import Path

OBJECT_SCHEMES = ("s3://", "gs://", "az://")
"""Beginnings of URLs of object storage: S3 and services that speak its protocol, Google's, and Azure's."""


@dataclass(frozen=True)
class ObjectPath:
    """A name in object storage, with the part of pathlib's interface that composes names. Object storage has no
    folders, only common prefixes; they are called folders here."""

    url: str
    """The URL, without a trailing slash."""

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        """The URL's scheme, with the slashes after it."""
        return self.url[: self.url.index("://") + 3]

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.url.rpartition("/")[0])


StoragePath = Path | ObjectPath


def storage_path(text: str) -> StoragePath:
    return ObjectPath(text.rstrip("/")) if is_object(text) else Path(text)


def is_object(text: str) -> bool:
    return text.startswith(OBJECT_SCHEMES)
