"""Validates a job without an API server, with the same models, CEL rules and error messages."""

from collections.abc import Iterator
from typing import Any

import cel
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.embedded import misfits
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.spec.rules.job import METADATA_RULES, SPEC_RULES
from pseudoreal_api.spec.rules.rule import Rule


class InvalidJob(ValueError):
    """The API server would refuse the job; the text has one sentence per line."""


def check_job(body: dict[str, Any]) -> PseudoRealJob:
    """Return the job described by `body`. Raises InvalidJob with all error messages that `kubectl apply` would show."""
    if (body.get("apiVersion"), body.get("kind")) != (API_VERSION, KIND):
        raise InvalidJob(
            f"apiVersion and kind are {body.get('apiVersion')} {body.get('kind')}; use {API_VERSION} {KIND}"
        )
    try:
        job = PseudoRealJob.model_validate({key: body.get(key, {}) for key in ("metadata", "spec")})
    except ValidationError as error:
        raise InvalidJob("\n".join(_sentence(e) for e in error.errors())) from error
    if unfit := misfits(job.spec):
        # Like the API server, skip the CEL rules if parts that are core/v1 types are malformed.
        raise InvalidJob("\n".join(unfit))
    spec = job.spec.to_dict()
    sentences = [*_repeated(job.spec, "spec")]
    sentences += _broken(SPEC_RULES, spec) + _broken(METADATA_RULES, {"metadata": job.metadata.to_dict(), "spec": spec})
    if sentences:
        raise InvalidJob("\n".join(sentences))
    return job


def _broken(rules: tuple[Rule, ...], subject: dict[str, Any]) -> list[str]:
    context = cel.Context({"self": subject})
    context.add_function("format", _format)
    return [str(cel.evaluate(rule.message, context)) for rule in rules if cel.evaluate(rule.rule, context) is not True]


def _repeated(model: BaseModel, path: str) -> Iterator[str]:
    """Yield the API server's sentences for map lists with a repeated key."""
    for name, field in type(model).model_fields.items():
        value, here = getattr(model, name), f"{path}.{to_camel(name)}"
        if isinstance(value, BaseModel):
            yield from _repeated(value, here)
        elif isinstance(value, list):
            extra: Any = field.json_schema_extra or {}
            keys = extra.get("x-kubernetes-list-map-keys", [])
            known = [[getattr(item, key) for key in keys] for item in value]
            for i, item in enumerate(value):
                if keys and known[i] in known[:i]:
                    yield f"{here}[{i}]: duplicate value {', '.join(map(str, known[i]))}; keep one of them"
                if isinstance(item, BaseModel):
                    yield from _repeated(item, f"{here}[{i}]")


def _format(template: str, values: list[Any]) -> str:
    """Return the formatted template, as Kubernetes' CEL function `format` does, for the directives in the rules."""
    return template.replace("%d", "%s") % tuple(values)


def _sentence(error: Any) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    return f"{''.join(parts).lstrip('.')}: {error['msg']} (found {error['input']!r})"
