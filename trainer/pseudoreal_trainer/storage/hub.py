"""Hugging Face's hub: revisions, which are pinned to a commit, and sentences for its refusals."""

import os
import re
from typing import Any
from urllib.parse import unquote

from pseudoreal_trainer.errors import InvalidJobError, causes
from pseudoreal_trainer.storage import services
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath, storage_path
from pseudoreal_trainer.storage.services import StorageUnavailable

SCHEME = "hf://"
_COMMIT = re.compile("[0-9a-f]{40}")
_URL = re.compile(
    r"hf://(?P<datasets>datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?"
    r"(?P<path>/.*)?"
)


class _Place:
    """An hf:// URL in parts. Raises InvalidJobError for any other text."""

    def __init__(self, url: str) -> None:
        found = _URL.fullmatch(url)
        if found is None:
            raise InvalidJobError(
                f"{url} is no address on the hub; these are hf://datasets/OWNER/NAME[@REVISION]/PATH for text, and"
                " hf://OWNER/NAME@REVISION for weights"
            )
        self.is_dataset = found["datasets"] is not None
        self.name, self.path = found["name"], found["path"] or ""
        self.revision = unquote(found["revision"]) if found["revision"] else None

    @property
    def page(self) -> str:
        """Path of the repository's page on the hub."""
        return f"{'datasets/' if self.is_dataset else ''}{self.name}"

    @property
    def kind(self) -> str:
        return "dataset" if self.is_dataset else "model"


def is_dataset(url: str) -> bool:
    return _Place(url).is_dataset


def is_pinned(url: str) -> bool:
    return _COMMIT.fullmatch(_Place(url).revision or "") is not None


def pinned(url: str) -> str:
    """Return the URL with the commit that its revision is now. Raises the library's errors."""
    place = _Place(url)
    if is_pinned(url):
        return url
    with services.packages_of(url):
        from huggingface_hub import HfApi
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    commit = api.repo_info(place.name, repo_type=place.kind, revision=place.revision, timeout=60).sha
    return f"{SCHEME}{place.page}@{commit}{place.path}"


def weights_folder(text: str) -> StoragePath:
    """Return the folder of a model's weights, a path or a URL. Raises InvalidJobError for one on the hub that is not
    pinned to a commit: another execution could read other weights."""
    if not text.startswith(SCHEME):
        return storage_path(text)
    place = _Place(text)
    if place.is_dataset:
        raise InvalidJobError(f"{text} is a dataset; weights are at hf://OWNER/NAME@COMMIT")
    if is_pinned(text):
        return ObjectPath(text.rstrip("/"))
    try:
        now = f"it is now at {pinned(text)}"
    except Exception as error:
        now = f"which it has cannot be asked ({services.reason(error)}); {_page(place)}/commits lists them"
    raise InvalidJobError(
        f"{text} names {place.revision or 'no revision'}, and weights must not change between two executions; give a"
        f" commit of 40 hexadecimal digits: {now}"
    )


def _page(place: _Place) -> str:
    return f"{(os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')}/{place.page}"


def unavailable(url: str, error: BaseException) -> StorageUnavailable:
    """Return the error for a file that a service does not give; for the hub, with its reason."""
    if not url.startswith(SCHEME):
        return services.unavailable(url, error)
    place, why = _Place(url), _refusal(error)
    return StorageUnavailable(
        why.format(
            url=url,
            kind=place.kind,
            name=place.name,
            page=_page(place),
            revision=place.revision or "main",
            reason=services.reason(error),
        )
    )


def _refusal(error: BaseException) -> str:
    try:
        from huggingface_hub import errors
    except ImportError:
        return "{url} cannot be read: {reason}"
    of_hub: list[tuple[type[Any] | tuple[type[Any], ...], str]] = [
        (
            errors.GatedRepoError,
            "the {kind} {name} is gated: accept its conditions on {page}, and set HF_TOKEN to a token of that account",
        ),
        (
            errors.RevisionNotFoundError,
            "the {kind} {name} has no revision {revision}; its branches, tags and commits are on {page}",
        ),
        (
            errors.RepositoryNotFoundError,
            "the {kind} {name} is not on the hub, or it is private, or the token is not valid any more; check the name"
            " on {page}, and set HF_TOKEN to a token that may read it",
        ),
        (
            (errors.EntryNotFoundError, FileNotFoundError),
            "{url} is not there; the files of the {kind} are on {page}",
        ),
    ]
    for kind, text in of_hub:
        if any(isinstance(each, kind) for each in causes(error)):
            return text
    if services.status_of(error) in (401, 403):
        return "the hub refuses access to {url} ({reason}); set HF_TOKEN to a token that is valid and may read it"
    return "{url} cannot be read from the hub: {reason}"
