"""Services that hold files under a URL: access by fsspec, and sentences for their errors.

Credentials come from the environment alone, as each service's own library finds them there.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pseudoreal_trainer.errors import TrainingError, causes, how_to_install

_QUERY = re.compile(r"\?[^\s'\">)]+")
_MOST_THREADS = 8
"""Maximum number of concurrent requests, to a service whose file system makes one at a time."""
_MOST_REASON = 500
"""Maximum number of characters of a service's error that are repeated."""
_MOST_WAIT = 300.0
"""Most seconds for which the hub may ask to wait: the window in which it counts requests. Its library obeys any
number."""
_SILENCE = 60.0
"""Seconds without any byte from the hub after which a request has failed. Its library lists without a limit."""
_RESET = re.compile(r";\s*t\s*=\s*(\d+)")
"""Pattern in the header RateLimit. Group 1: seconds until requests are allowed again."""


class StorageUnavailable(TrainingError):
    """Object storage is not reachable or refuses access, so its contents are unknown."""


@dataclass(frozen=True)
class Service:
    name: str
    """Name of the service's file system in fsspec, and of the extra of this package that installs it."""
    check: str
    """Advice if the service gives no access."""


SERVICES = {
    "s3": Service("s3", "check the bucket, and AWS_ENDPOINT_URL and the credentials in the environment"),
    "gs": Service(
        "gs",
        "check the bucket, and the credentials: the pod's service account, or the file that"
        " GOOGLE_APPLICATION_CREDENTIALS names",
    ),
    "az": Service(
        "az",
        "check the container, AZURE_STORAGE_ACCOUNT_NAME, and the credentials in the environment: an identity, or"
        " AZURE_STORAGE_ACCOUNT_KEY, _SAS_TOKEN or _CONNECTION_STRING",
    ),
    "hf": Service("hf", "check the name, and that the token in HF_TOKEN may read it"),
    "https": Service("https", "check the address"),
}


def scheme_of(url: str) -> str:
    return url.partition("://")[0]


def service_of(url: str) -> Service:
    return SERVICES[scheme_of(url)]


def file_system(url: str) -> Any:
    """Return the fsspec file system for the URL. Raises StorageUnavailable if its packages are not installed."""
    name = service_of(url).name
    # The library reads this variable when it is imported.
    options = {"endpoint": os.environ.get("HF_ENDPOINT")} if name == "hf" else {}
    # Rapid buckets of Google need gRPC, and a request for each bucket to know them.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    with packages_of(url):
        import fsspec

        if name == "hf":
            _bound_waits_for_hub()
        # Listings are not cached: other processes write meanwhile.
        return fsspec.filesystem(name, use_listings_cache=False, **options)


@cache
def _bound_waits_for_hub() -> None:
    """Bound, in this process, the time that huggingface_hub waits for an answer, or because an answer asks for it."""
    from huggingface_hub import get_session, set_client_factory

    # The class of the client depends on the library's release.
    kind, hooks = type(get_session()), get_session().event_hooks
    bounded: dict[str, list[Callable[..., Any]]] = {
        "request": [*hooks["request"], _bound_silence],
        "response": [*hooks["response"], _refuse_long_wait],
    }
    set_client_factory(lambda: kind(event_hooks=bounded, follow_redirects=True, timeout=None))


def _bound_silence(request: Any) -> None:
    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: limits.get(name) or _SILENCE for name in ("connect", "read", "write", "pool")
    }


def _refuse_long_wait(response: Any) -> None:
    if response.status_code < 400:
        return
    asked = [response.headers.get("Retry-After", "").strip()]
    if response.status_code == 429 and (reset := _RESET.search(response.headers.get("RateLimit", ""))):
        asked.append(reset[1])
    seconds = max(float(text) if text.isdecimal() else 0.0 for text in asked)
    if seconds > _MOST_WAIT:
        raise StorageUnavailable(
            f"the hub asks to wait {seconds:,.0f} s before the next request, and {_MOST_WAIT:.0f} s is the longest"
            " wait; start again after that, or set HF_TOKEN: accounts have higher limits"
        )


def read_ranges(files: Any, urls: Sequence[str], begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Return the bytes begin..end-1 of each file of a file system, requested concurrently. Raises its errors."""
    if files.async_impl:
        return list(files.cat_ranges([*urls], [*begins], [*ends], on_error="raise"))
    with ThreadPoolExecutor(min(len(urls), _MOST_THREADS)) as pool:
        return [*pool.map(partial(_read_range, files), urls, begins, ends)]


def _read_range(files: Any, url: str, begin: int, end: int) -> bytes:
    with files.open(url, "rb", cache_type="none") as opened:
        opened.seek(begin)
        content: bytes = opened.read(end - begin)
    return content


@contextmanager
def packages_of(url: str) -> Iterator[None]:
    """Turn the ImportError of a service's packages into StorageUnavailable, which names them."""
    try:
        yield
    except ImportError as error:
        raise StorageUnavailable(
            f"{without_secrets(url)} needs packages that are not installed; {how_to_install(service_of(url).name)}"
        ) from error


def unavailable(url: str, error: BaseException) -> StorageUnavailable:
    server = "the web server" if scheme_of(url) == "https" else "object storage"
    return StorageUnavailable(
        f"{server} does not give access to {without_secrets(url)}: {reason(error)}; {service_of(url).check}"
    )


def reason(error: BaseException) -> str:
    """Return the first line of a service's error. Query strings are left out, because they may hold a signature."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # with the service's own words
    text = without_secrets(f"{type(error).__name__}: {error}".partition("\n")[0])
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}…"


def without_secrets(text: str) -> str:
    return _QUERY.sub("?…", text)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer behind a service's error; None if there was no answer."""
    for each in causes(error):
        response = getattr(each, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        found = [metadata.get("HTTPStatusCode"), getattr(response, "status_code", None)]
        found += [getattr(each, name, None) for name in ("status", "status_code", "code")]
        if statuses := [number for number in found if isinstance(number, int) and 100 <= number < 600]:
            return statuses[0]
    return None
