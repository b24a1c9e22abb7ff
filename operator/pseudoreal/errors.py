"""Errors of the client, and their translation from answers of the API server. Pure.

The text of an error is a sentence for the user; `server_message` has the sentence of the API server.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pseudoreal_api.base import GROUP, KIND, PLURAL
from pseudoreal_api.spec.rules.rule import SEPARATOR
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.untrusted_text import sanitize

Json = dict[str, Any]

_LOGIN = "the cluster does not know who you are; renew your credentials, or choose others with --context"


class ClientError(Exception):
    """Any failure of a request, or of a job that is waited for."""

    status: int | None = None
    """HTTP status of the API server's answer; None without an answer."""
    server_message: str = ""
    """The API server's own sentence; empty without an answer."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.message = sentence

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later, because the API server is overloaded or restarts."""
        return self.status is not None and (self.status == 429 or self.status >= 500)


class NoCluster(ClientError):
    """No cluster is configured."""


class Unreachable(ClientError):
    """The API server does not answer."""

    @property
    def may_pass(self) -> bool:
        return True


class Forbidden(ClientError):
    """The user may not do this."""


class Unauthorized(Forbidden):
    """The API server does not know the user."""


class NotFound(ClientError):
    """The job, its pods, a phase or a namespace does not exist."""


class JobDeleted(NotFound):
    """The job was deleted while it was watched."""


class NotInstalled(ClientError):
    """The cluster has no PseudoRealJobs."""


class AlreadyExists(ClientError):
    """There is a job of this name."""


class Conflict(ClientError):
    """The object has changed since it was read."""


class Rejected(ClientError):
    """The API server rejects the object."""

    causes: Sequence[str] = ()
    """Sentences of the API server, each starting with the field if the API server names one."""


class Unreadable(ClientError):
    """An object or a log is too large, or is not of this release."""


class NoEffect(ClientError):
    """The request would change nothing, or the state of the job does not allow it."""


class NamespaceConflict(ClientError):
    """The job and the client name different namespaces."""

    def __init__(self, own: str, client: str) -> None:
        super().__init__(f"the job says namespace {own}, and the client {client}; remove one of them")
        self.own, self.client = own, client


class JobEnded(ClientError):
    """The job has ended in another state than the awaited one. `job_status`: the job's last status."""

    def __init__(self, sentence: str, job_status: PseudoRealJobStatus) -> None:
        super().__init__(sentence)
        self.job_status = job_status


class JobFailed(JobEnded):
    """The job has failed."""


class WaitTimeout(ClientError, TimeoutError):
    """The awaited state did not come in time; the job goes on. `job_status`: the newest status; None: none was read."""

    def __init__(self, sentence: str, job_status: PseudoRealJobStatus | None) -> None:
        super().__init__(sentence)
        self.job_status = job_status


class RunFailed(ClientError):
    """A run on this machine has ended before its last phase was complete. `outcome`: Failed, Yielded or InvalidJob."""

    def __init__(self, sentence: str, outcome: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


class Target(NamedTuple):
    """Target of a request. `kind` is a kind or a plural; `namespace` is None for all namespaces."""

    verb: str
    kind: str
    name: str
    namespace: str | None

    @property
    def place(self) -> str:
        return f"in namespace {self.namespace}" if self.namespace else "in all namespaces"


def unreachable(host: str, target: Target, error: Exception) -> Unreachable:
    return Unreachable(
        f"the cluster at {host} does not answer ({target.verb} {target.kind}: {sanitize(str(error), 300)}); is it up,"
        " is its network within reach, and is this the context that you mean (`kubectl config current-context`)?"
    )


def error_of_response(status: int, text: str, target: Target) -> ClientError:
    """Return the exception for a failed response."""
    body = _read_status(text)
    found = _error_of_body(status, body, target)
    found.status, found.server_message = status, _message(body)
    return found


def _error_of_body(status: int, body: Json, target: Target) -> ClientError:
    details: Json = body.get("details") or {}
    if status == 401:
        return Unauthorized(_LOGIN)
    if status == 403 and body.get("reason", "Forbidden") == "Forbidden" and "exceeded quota" not in _message(body):
        return _forbidden(body, target)
    if status == 404:
        return _not_found(details, target)
    if body.get("reason") == "AlreadyExists":
        return AlreadyExists(
            f"there is a {target.kind} {target.name} {target.place} already; give the new one another metadata.name, or"
            f" delete the old one: kubectl delete prj {target.name} -n {target.namespace}"
        )
    sentence = f"the cluster refuses to {target.verb} {target.kind} {target.name}: {_message(body) or status}"
    if status in (400, 422):
        rejected = Rejected(sentence)
        rejected.causes = [sentence for cause in details.get("causes") or [] for sentence in _sentences(cause)]
        return rejected
    return Conflict(sentence) if status == 409 and target.verb == "patch" else ClientError(sentence)


def _forbidden(body: Json, target: Target) -> Forbidden:
    role = "view" if target.verb in ("get", "list", "watch") else "edit"
    remedy = f"ask for the role `{role}` {target.place}"
    if target.kind == "nodes":
        remedy = "ask for the right to list nodes"
    elif target.namespace is None:
        remedy += ", or name a namespace of yours with -n"
    return Forbidden(f"you may not do this: {_message(body)}; {remedy}")


def _not_found(details: Json, target: Target) -> NotFound | NotInstalled:
    # Without the CRD, the API server knows no such path, so its 404 names no missing object.
    if target.kind in (KIND, "pseudorealjobs") and not details.get("name"):
        return NotInstalled(
            f"the cluster has no {KIND}s: pseudoreal is not installed there;"
            " `helm install pseudoreal charts/pseudoreal` installs it (README.md)"
        )
    if target.verb == "create":
        return NotFound(
            f"there is no namespace {target.namespace}; `kubectl create namespace {target.namespace}` makes it"
        )
    return NotFound(
        f"there is no {target.kind.removeprefix('the log of ')} {target.name} {target.place};"
        f" `pseudoreal get -n {target.namespace}` lists its jobs, and `pseudoreal get -A` those of all namespaces"
    )


_DENIED = f"ValidatingAdmissionPolicy '{PLURAL}.{GROUP}' with binding '{PLURAL}.{GROUP}' denied request: "


def _sentences(cause: Json) -> list[str]:
    """Return the sentences of a cause: the policy of the definition joins those of all broken rules."""
    message = cause.get("message") or ""
    if message.startswith(_DENIED):
        return [sanitize(sentence) for sentence in message.removeprefix(_DENIED).split(SEPARATOR)]
    return [_cause(cause)]


def _cause(cause: Json) -> str:
    field, message = cause.get("field") or "", sanitize(cause.get("message") or "")
    message = message.removeprefix('Invalid value: "object": ').removeprefix('Invalid value: "array": ')
    if field in ("", "<nil>"):
        return message
    # From Kubernetes 1.37 on, a rule's message follows without "object" or "array".
    stated = message.removeprefix("Invalid value: ")
    return stated if stated.startswith(field) else f"{field}: {message}"


def _read_status(text: str) -> Json:
    try:
        status_body = json.loads(text)
    except (ValueError, RecursionError):
        status_body = {"message": text}
    return status_body if isinstance(status_body, dict) else {}


def _message(status_body: Json) -> str:
    return sanitize(str(status_body.get("message") or "")).strip()
