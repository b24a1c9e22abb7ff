"""Translates a failed request into a sentence for the user, with the remedy and an exit code. Pure."""

import json
from typing import Any, NamedTuple, TypeVar

from pseudoreal_api.base import KIND
from pseudoreal_operator.untrusted_text import sanitize
from pseudoreal_trainer.cli.common import CommandError, ExitStatus

Json = dict[str, Any]
R = TypeVar("R", bound=CommandError)

_LOGIN = "the cluster does not know who you are; renew your credentials, or choose others with --context"


class Target(NamedTuple):
    """Target of a request. `kind` is a kind or a plural; `namespace` is None for all namespaces."""

    verb: str
    kind: str
    name: str
    namespace: str | None

    @property
    def place(self) -> str:
        return f"in namespace {self.namespace}" if self.namespace else "in all namespaces"


class Rejected(CommandError):
    """The API server rejects the object. `causes`: sentences of the API server, each starting with the field if the API
    server names one."""

    def __init__(self, sentence: str, causes: list[str]) -> None:
        super().__init__(sentence, ExitStatus.INVALID_JOB)
        self.causes = causes


def unreachable(host: str, target: Target, error: Exception) -> CommandError:
    return CommandError(
        f"the cluster at {host} does not answer ({target.verb} {target.kind}: {sanitize(str(error), 300)}); is it up,"
        " is its network within reach, and is this the context that you mean (`kubectl config current-context`)?",
        ExitStatus.NO_CLUSTER,
    )


def error_of_response(status: int, text: str, target: Target, kind: type[R]) -> R | CommandError:
    """Return the exception for a failed response. `kind`: class of the exception for all other failures."""
    status_body = _read_status(text)
    details: Json = status_body.get("details") or {}
    if status == 401:
        return CommandError(_LOGIN, ExitStatus.FORBIDDEN)
    if (
        status == 403
        and status_body.get("reason", "Forbidden") == "Forbidden"
        and "exceeded quota" not in _message(status_body)
    ):
        return _forbidden(status_body, target)
    if status == 404:
        return _not_found(details, target)
    if status_body.get("reason") == "AlreadyExists":
        return CommandError(
            f"there is a {target.kind} {target.name} {target.place} already; give the new one another metadata.name, or"
            f" delete the old one: kubectl delete prj {target.name} -n {target.namespace}"
        )
    if status in (400, 422):
        return _rejected(status_body, details, target)
    return kind(f"the cluster refuses to {target.verb} {target.kind} {target.name}: {_message(status_body) or status}")


def _forbidden(status_body: Json, target: Target) -> CommandError:
    role = "view" if target.verb in ("get", "list") else "edit"
    remedy = f"ask for the role `{role}` {target.place}"
    if target.kind == "nodes":
        remedy = "ask for the right to list nodes"
    elif target.namespace is None:
        remedy += ", or name a namespace of yours with -n"
    return CommandError(f"you may not do this: {_message(status_body)}; {remedy}", ExitStatus.FORBIDDEN)


def _not_found(details: Json, target: Target) -> CommandError:
    # Without the CRD, the API server knows no such path, so its 404 names no missing object.
    if target.kind in (KIND, "pseudorealjobs") and not details.get("name"):
        return CommandError(
            f"the cluster has no {KIND}s: pseudoreal is not installed there;"
            " `helm install pseudoreal charts/pseudoreal` installs it (README.md)",
            ExitStatus.NOT_INSTALLED,
        )
    if target.verb == "create":
        return CommandError(
            f"there is no namespace {target.namespace}; `kubectl create namespace {target.namespace}` makes it",
            ExitStatus.NOT_FOUND,
        )
    return CommandError(
        f"there is no {target.kind.removeprefix('the log of ')} {target.name} {target.place};"
        f" `pseudoreal get -n {target.namespace}` lists its jobs, and `pseudoreal get -A` those of all namespaces",
        ExitStatus.NOT_FOUND,
    )


def _rejected(status_body: Json, details: Json, target: Target) -> CommandError:
    causes = [_cause(cause) for cause in details.get("causes") or []]
    return Rejected(
        f"the cluster refuses to {target.verb} {target.kind} {target.name}: {_message(status_body)}", causes
    )


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
    except ValueError:
        status_body = {"message": text}
    return status_body if isinstance(status_body, dict) else {}


def _message(status_body: Json) -> str:
    return sanitize(str(status_body.get("message") or "")).strip()
