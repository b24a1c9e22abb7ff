"""CEL transition rules: changes of a job refused by the API server.

The fields of an existing phase that affect its weights are immutable. The last phase may be extended, and phases may be
added after it. Fields about the placement of pods may change during suspension, because queue controllers change these
fields.
"""

from typing import Any

_INDICES = "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
_ANEW = "delete the job and create it again to change it"
_SUSPEND = "set spec.suspend to true first, and change it while the job is suspended"


def _validation(rule: str, message: str) -> dict[str, Any]:
    return {"rule": rule, "message": message}


def immutable(field: str) -> dict[str, Any]:
    """Return the schema extension of an immutable spec field."""
    return {"x-kubernetes-validations": [_validation("self == oldSelf", f"spec.{field} is immutable; {_ANEW}")]}


def _kept(field: str) -> dict[str, Any]:
    """Return the rule that a phase's field is immutable. `phases` is a map list keyed by name, so `oldSelf` is the
    phase of the same name."""
    return _validation(f"self.{field} == oldSelf.{field}", f"phases[].{field} is immutable; {_ANEW}")


def _kept_or_absent(field: str) -> dict[str, Any]:
    return _validation(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"phases[].{field} is immutable; {_ANEW}",
    )


PHASE_CHANGES: list[Any] = [
    *map(_kept_or_absent, ("layers", "growth", "experts", "sharing")),
    _kept("workers"),
    _kept("spares"),
    _kept_or_absent("elastic"),
    _kept_or_absent("processesPerWorker"),
    *map(_kept, ("batch", "mixture", "parallelism", "activations", "offload", "compile")),
]


def _may_grow(bound: str) -> str:
    new, old = f"self[i].until.{bound}", f"oldSelf[i].until.{bound}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} >= {old})"


def _same(bound: str) -> str:
    new, old = f"self[i].until.{bound}", f"oldSelf[i].until.{bound}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


_GROWS = " && ".join([_may_grow("step"), _may_grow("tokens"), _same("validationLoss"), _same("gradientCorrelation")])

PHASES_CHANGES: list[Any] = [
    _validation(
        f"size(self) >= size(oldSelf) && {_INDICES}.all(i, i >= size(oldSelf) || self[i].name == oldSelf[i].name)",
        "spec.phases: phases may only be added at the end; a phase cannot be removed, moved or renamed",
    ),
    _validation(
        f"size(self) < size(oldSelf) || {_INDICES}.all(i, i >= size(oldSelf) || self[i].until == oldSelf[i].until"
        f" || (i == size(oldSelf) - 1 && {_GROWS}))",
        "spec.phases: of until, only step and tokens of the last phase may change, and only grow",
    ),
]


def _while_running(field: str) -> str:
    new, old = f"self.phases[i].{field}", f"oldSelf.phases[i].{field}"
    return f"{_INDICES}.all(i, i >= size(oldSelf.phases) || i >= size(self.phases) || {new} == {old})"


SPEC_CHANGES: list[Any] = (
    [
        _validation(
            f"oldSelf.suspend || self.{field} == oldSelf.{field}",
            f"spec.{field} is immutable while the job runs; {_SUSPEND}",
        )
        for field in ("logging", "pod", "scheduling")
    ]
    + [
        _validation(
            f"oldSelf.suspend || {_while_running(field)}",
            f"spec.phases[].{field} is immutable while the job runs; {_SUSPEND}",
        )
        for field in ("pod", "resources")
    ]
    + [
        # The rule is on the spec, not on the optional field itself: the API server skips a field's rules when it is
        # removed.
        _validation(
            "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy =="
            " oldSelf.managedBy)",
            f"spec.managedBy is immutable; {_ANEW}",
        )
    ]
)

JOB_CHANGES: list[Any] = [
    _validation(
        "!has(oldSelf.status) || !has(oldSelf.status.completionTime) || self.spec.phases == oldSelf.spec.phases",
        "spec.phases: the job has ended; to train on, create a job with spec.checkpoint.continueFrom",
    ),
]
