"""Files on a web server, read by requests for ranges. Only https: the content cannot be replaced on the way."""

import urllib.error
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, Any, cast

from pseudoreal_trainer.storage.services import StorageUnavailable, without_secrets

_TIMEOUT = 60.0
"""Seconds without any byte after which a request has failed."""
_VERSIONS = ("ETag", "Last-Modified")


def info(url: str) -> dict[str, Any]:
    """Return size and version of a file, as fsspec describes them. HEAD would not do: a signed URL is for GET."""
    try:
        with _get(url, 0, 1) as answer:
            whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
            if answer.status == 200 and answer.headers.get("Content-Length") == "0":
                whole = "0"
            elif answer.status != 206 or not whole.isdigit():
                raise _without_ranges(url)
            return {"size": int(whole)} | {name: answer.headers.get(name) for name in _VERSIONS}
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == "bytes */0":
            return {"size": 0} | {name: error.headers.get(name) for name in _VERSIONS}
        raise


def read(url: str, begin: int, end: int, version: str) -> bytes:
    """Return the bytes begin..end-1 of the file in this version; empty: the server names no versions."""
    with _get(url, begin, end) as answer:
        if answer.status != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            raise _without_ranges(url)
        now = next((found for name in _VERSIONS if (found := answer.headers.get(name))), "").strip('"')
        if now != version:
            raise StorageUnavailable(
                f"{without_secrets(url)} has changed while it was read (it was {version}, and is {now}); start again"
                " once nobody writes it"
            )
        content = answer.read(end - begin)  # and no more, however much the server sends
    if len(content) != end - begin:
        raise OSError(f"{len(content):,} bytes came of the {end - begin:,} from byte {begin:,} on")
    return content


class _OnlyHttps(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.startswith("https://"):
            raise StorageUnavailable(
                f"{without_secrets(req.full_url)} redirects to {without_secrets(newurl)}, which is not https://"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _get(url: str, begin: int, end: int) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-{end - 1}", "User-Agent": "pseudoreal"})  # noqa: S310
    opener = urllib.request.build_opener(_OnlyHttps)
    return cast(HTTPResponse, opener.open(request, timeout=_TIMEOUT))


def _without_ranges(url: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"the server of {without_secrets(url)} does not send parts of a file (Range); download the file, and give its"
        " path"
    )
