"""Translates a failed request into a sentence for the user, with the remedy and an exit code. Pure."""

import json
from typing import Any, NamedTuple, TypeVar

from pseudoreal_api.base import KIND
from pseudoreal_operator.foreign import clean
from pseudoreal_trainer.cli.common import CommandError, ExitStatus

Json = dict[str, Any]
R = TypeVar("R", bound=CommandError)

_LOGIN = "the cluster does not know who you are; renew your credentials, or choose others with --context"


class Asked(NamedTuple):
    """Target of a request. `kind` is a kind or a plural; `namespace` is None for all namespaces."""

    verb: str
    kind: str
    name: str
    namespace: str | None

    @property
    def place(self) -> str:
        return f"in namespace {self.namespace}" if self.namespace else "in all namespaces"


class Rejected(CommandError):
    """The API server rejects the object. `causes` are its sentences, each starting with the field."""

    def __init__(self, sentence: str, causes: list[str]) -> None:
        super().__init__(sentence, ExitStatus.INVALID_JOB)
        self.causes = causes


def no_answer(host: str, asked: Asked, error: Exception) -> CommandError:
    return CommandError(
        f"the cluster at {host} does not answer ({asked.verb} {asked.kind}: {clean(str(error), 300)}); is it up, is its"
        " network within reach, and is this the context that you mean (`kubectl config current-context`)?",
        ExitStatus.NO_CLUSTER,
    )


def failure(status: int, text: str, asked: Asked, kind: type[R]) -> R | CommandError:
    """Return the exception for a failed response. `kind` is the class for failures without a class of their own."""
    said = _status(text)
    details: Json = said.get("details") or {}
    if status == 401:
        return CommandError(_LOGIN, ExitStatus.FORBIDDEN)
    if status == 403 and said.get("reason", "Forbidden") == "Forbidden" and "exceeded quota" not in _message(said):
        return _forbidden(said, asked)
    if status == 404:
        return _not_found(details, asked)
    if said.get("reason") == "AlreadyExists":
        return CommandError(
            f"there is a {asked.kind} {asked.name} {asked.place} already; give the new one another metadata.name, or"
            f" delete the old one: kubectl delete prj {asked.name} -n {asked.namespace}"
        )
    if status in (400, 422):
        return _rejected(said, details, asked)
    return kind(f"the cluster refuses to {asked.verb} {asked.kind} {asked.name}: {_message(said) or status}")


def _forbidden(said: Json, asked: Asked) -> CommandError:
    role = "view" if asked.verb in ("get", "list") else "edit"
    remedy = f"ask for the role `{role}` {asked.place}"
    if asked.kind == "nodes":
        remedy = "ask for the right to list nodes"
    elif asked.namespace is None:
        remedy += ", or name a namespace of yours with -n"
    return CommandError(f"you may not do this: {_message(said)}; {remedy}", ExitStatus.FORBIDDEN)


def _not_found(details: Json, asked: Asked) -> CommandError:
    # Without the CRD, the API server knows no such path, so its 404 names no missing object.
    if asked.kind in (KIND, "pseudorealjobs") and not details.get("name"):
        return CommandError(
            f"the cluster has no {KIND}s: pseudoreal is not installed there;"
            " `helm install pseudoreal charts/pseudoreal` installs it (README.md)",
            ExitStatus.NOT_INSTALLED,
        )
    if asked.verb == "create":
        return CommandError(
            f"there is no namespace {asked.namespace}; `kubectl create namespace {asked.namespace}` makes it",
            ExitStatus.NOT_FOUND,
        )
    return CommandError(
        f"there is no {asked.kind.removeprefix('the log of ')} {asked.name} {asked.place};"
        f" `pseudoreal get -n {asked.namespace}` lists its jobs, and `pseudoreal get -A` those of all namespaces",
        ExitStatus.NOT_FOUND,
    )


def _rejected(said: Json, details: Json, asked: Asked) -> CommandError:
    causes = [_cause(cause) for cause in details.get("causes") or []]
    return Rejected(f"the cluster refuses to {asked.verb} {asked.kind} {asked.name}: {_message(said)}", causes)


def _cause(cause: Json) -> str:
    field, message = cause.get("field") or "", clean(cause.get("message") or "")
    message = message.removeprefix('Invalid value: "object": ').removeprefix('Invalid value: "array": ')
    return message if field in ("", "<nil>") or message.startswith(field) else f"{field}: {message}"


def _status(text: str) -> Json:
    try:
        said = json.loads(text)
    except ValueError:
        said = {"message": text}
    return said if isinstance(said, dict) else {}


def _message(said: Json) -> str:
    return clean(str(said.get("message") or "")).strip()
