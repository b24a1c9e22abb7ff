"""Validates a job without an API server, with the same models, CEL rules and error messages."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice, pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.embedded import misfits
from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.rules.job import METADATA_RULES, SPEC_RULES
from pseudoreal_api.spec.rules.rule import PhaseRule, Rule

_FIELDS = {"apiVersion", "kind", "metadata", "spec", "status"}
_METADATA_FIELDS = {"annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"}
_METADATA_FIELDS |= {"generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"}
_METADATA_FIELDS |= {"resourceVersion", "selfLink", "uid"}


class InvalidJob(ValueError):
    """The API server would refuse the job; the text has one sentence per line."""


def check_job(body: dict[str, Any]) -> PseudoRealJob:
    """Return the job described by `body`. Raises InvalidJob with all error messages that `kubectl apply` would show."""
    if (body.get("apiVersion"), body.get("kind")) != (API_VERSION, KIND):
        raise InvalidJob(
            f"apiVersion and kind are {body.get('apiVersion')} {body.get('kind')}; use {API_VERSION} {KIND}"
        )
    try:
        given = _without_nulls(PseudoRealJob, {key: body.get(key) or {} for key in ("metadata", "spec")})
        # Strictly: neither JSON nor the API server takes a text for a number, or a number for a bool.
        job = PseudoRealJob.model_validate(given, strict=True)
    except ValidationError as error:
        raise InvalidJob("\n".join(_sentence(e) for e in error.errors())) from error
    if unfit := misfits(job.spec):
        # Like the API server, skip the CEL rules if parts that are core/v1 types are malformed.
        raise InvalidJob("\n".join(unfit))
    sentences = [*_unknown(body), *_wrong_labels(job.metadata.labels), *_repeated(job.spec, "spec")]
    sentences += [job.queue_conflict] if job.queue_conflict else []
    sentences += broken_rules(job.metadata, job.spec).values()
    if sentences:
        raise InvalidJob("\n".join(sentences))
    return job.with_queue()


def _unknown(body: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each unknown field outside of the spec."""
    yield from (f"{field}: there is no such field" for field in body if field not in _FIELDS)
    unknown = (field for field in body["metadata"] if field not in _METADATA_FIELDS)
    yield from (f"metadata.{field}: there is no such field" for field in unknown)


def _without_nulls(kind: Any, value: Any) -> Any:
    """Return the value without nulls in the places of our own fields and entries, where they mean the default or
    nothing, as for the API server. In parts that are core/v1 types a null may have a meaning: they stay as they are."""
    if isinstance(value, list):
        items = next(iter(_arguments(kind, list)), Any)
        return [_without_nulls(items, item) for item in value]
    if not isinstance(value, dict):
        return value
    model = next((one for one in _alternatives(kind) if isinstance(one, type) and issubclass(one, BaseModel)), None)
    if model is not None:
        kinds = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        kept = {key: item for key, item in value.items() if item is not None or key not in kinds}
        return {key: _without_nulls(kinds.get(key), item) for key, item in kept.items()}
    _, of_values = _arguments(kind, dict) or (None, Any)
    return value if of_values is Any else {key: item for key, item in value.items() if item is not None}


def _alternatives(kind: Any) -> list[Any]:
    """Return the members of a union; a type that is none is the only one."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _alternatives(get_args(kind)[0])
    if origin in (Union, UnionType):
        return [found for one in get_args(kind) for found in _alternatives(one)]
    return [kind]


def _arguments(kind: Any, of: type) -> tuple[Any, ...]:
    """Return the type arguments of the list or dict among the alternatives."""
    return next((get_args(one) for one in _alternatives(kind) if get_origin(one) is of), ())


_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def _wrong_labels(labels: dict[str, str]) -> Iterator[str]:
    for key, value in labels.items():
        if not _LABEL_VALUE.fullmatch(value):
            yield (
                f"metadata.labels.{key}: {value!r} is not a valid label value; use at most 63 letters, digits, -, _ and"
                " ., with a letter or digit at both ends"
            )


_RULES: tuple[Rule, ...] = (*SPEC_RULES, *METADATA_RULES)


def compile_rules(rules: Iterable[Rule] = _RULES) -> None:
    """Compile the conditions of the rules, once in a process. This takes a tenth of a second, with the import of the
    CEL library."""
    for rule in rules:
        _compiled(_condition(rule))


def broken_rules(
    metadata: JobMetadata,
    spec: PseudoRealJobSpec,
    rules: Iterable[Rule] = _RULES,
    most: int | None = None,
) -> dict[Rule, str]:
    """Return the rules that the job breaks, each with the sentence that the API server's policy shows.

    `most`: maximum number of evaluations; each takes about 0.03 ms, and a rule on phases has one for each phase or pair
    of phases. The remaining evaluations are left out. None: no maximum. (A maximum of seconds would make the result
    depend on the speed of the machine.)
    """
    broken: dict[Rule, str] = {}
    for rule, context in islice(_evaluations(rules, metadata, _outline(spec)), most):
        if rule not in broken and _compiled(_condition(rule)).execute(context) is not True:
            sentence = rule.sentence if isinstance(rule, PhaseRule) else rule.message
            broken[rule] = str(_compiled(sentence).execute(context))
    return {rule: broken[rule] for rule in rules if rule in broken}


def _condition(rule: Rule) -> str:
    return rule.holds if isinstance(rule, PhaseRule) else rule.rule


def _evaluations(rules: Iterable[Rule], metadata: JobMetadata, spec: dict[str, Any]) -> Iterator[tuple[Rule, Any]]:
    """Yield each rule with a context for its evaluation; a rule on phases with one for each phase or pair of phases.

    The CEL library copies the values that it is given, and again the value of each variable that a rule reads. So the
    phases take turns in one context, and only rules on the pods of phases see them.
    """
    phases = spec["phases"]
    slim = [{key: value for key, value in phase.items() if key != "pod"} for phase in phases]
    without = {key: value for key, value in spec.items() if key != "phases"}
    context = _context(without | {"phases": slim})
    yield from ((rule, context) for rule in rules if not isinstance(rule, PhaseRule) and rule not in METADATA_RULES)
    context = _context({"metadata": {"name": metadata.name}, "spec": {"phases": slim}})
    yield from ((rule, context) for rule in rules if rule in METADATA_RULES)
    context, of_phases = _context(without), [rule for rule in rules if isinstance(rule, PhaseRule)]
    for sees_pods, ones in ((False, slim), (True, phases)):
        for phase in ones:
            context.add_variable("p", phase)
            yield from (
                (rule, context) for rule in of_phases if not rule.of_pairs and ("p.pod" in rule.holds) == sees_pods
            )
    for p, q in pairwise(slim):
        context.add_variable("p", p)
        context.add_variable("q", q)
        yield from ((rule, context) for rule in of_phases if rule.of_pairs)


def _context(subject: dict[str, Any]) -> Any:
    import cel  # here, because its import takes longer than most commands, which check no job

    context = cel.Context({"self": subject})
    context.add_function("format", _format)
    return context


def _outline(spec: PseudoRealJobSpec) -> dict[str, Any]:
    """Return the spec with only as much of its large parts as rules read: whether a value of a type of core/v1 is
    there, and the number of homes."""
    homes = {"phases": {"__all__": {"offload": {"homes": True}}}}
    dumped: dict[str, Any] = _hollow(spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=homes))
    for phase, given in zip(dumped["phases"], spec.phases, strict=True):
        phase["offload"]["homes"] = [0] * len(given.offload.homes)
    return dumped


def _hollow(value: Any, key: str = "") -> Any:
    if key in ("template", "claimTemplate", "valueFrom"):
        return {}
    if isinstance(value, list):
        return [_hollow(item) for item in value]
    if isinstance(value, dict):
        if key == "volume":
            return {name: {} if isinstance(item, dict) else item for name, item in value.items()}
        return {name: _hollow(item, name) for name, item in value.items()}
    return value


@cache
def _compiled(expression: str) -> Any:
    """Compile a CEL expression. Kept for the life of the process: compiling takes longer than evaluating, and the
    expressions are the rules' own."""
    import cel

    return cel.compile(expression)


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
    remedy = "; put it in quotes" if error["type"] == "string_type" and isinstance(error["input"], int | float) else ""
    return f"{''.join(parts).lstrip('.')}: {error['msg']} (found {error['input']!r}){remedy}"
