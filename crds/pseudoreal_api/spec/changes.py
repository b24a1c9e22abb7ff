"""Changes of a job that the API server refuses: rules in CEL on a job, `self`, and the job before, `oldSelf`.

The fields of an existing phase that affect its weights are immutable. The last phase may be extended, and phases may be
added after it. Fields about the placement of pods may change during suspension, because queue controllers change these
fields.

The rules are part of the policy (`pseudoreal_api.publish.policy`), except the one that the operator relies on.
"""

from typing import Any

from pseudoreal_api.spec.rules.rule import Rule, says

_INDICES = "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
_ANEW = "delete the job and create it again to change it"
_SUSPEND = "set spec.suspend to true first, and change it while the job is suspended"

PHASES_CHANGES: list[Any] = [
    {
        "rule": "size(self) >= size(oldSelf)"
        f" && {_INDICES}.all(i, i >= size(oldSelf) || self[i].name == oldSelf[i].name)",
        "message": "spec.phases: phases may only be added at the end; a phase cannot be removed, moved or renamed",
    }
]
"""Validations of the definition. The status has an entry for each phase, in the order of the spec."""


def _same(path: str) -> str:
    """Return the condition that a field with a value or a default has not changed."""
    return f"self.{path} == oldSelf.{path}"


def _same_or_absent(path: str) -> str:
    new, old = f"self.{path}", f"oldSelf.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _may_grow(path: str) -> str:
    new, old = f"self.{path}", f"oldSelf.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} >= {old})"


def _of_each_phase(holds: str) -> str:
    """Return the condition on each phase i that was there before."""
    return f"{_INDICES}.all(i, i >= size(oldSelf.phases) || i >= size(self.phases) || {holds})"


def _immutable_in_phases(field: str, holds: str) -> Rule:
    return Rule(_of_each_phase(f"({holds})"), says(f"spec.phases[].{field} is immutable; {_ANEW}"))


_BOUNDS = "phases[i].until"
_GROWS = " && ".join(
    [
        *(_may_grow(f"{_BOUNDS}.{bound}") for bound in ("step", "tokens")),
        *(_same_or_absent(f"{_BOUNDS}.{bound}") for bound in ("validationLoss", "gradientCorrelation")),
    ]
)

SPEC_CHANGES: tuple[Rule, ...] = (
    *(
        Rule(_same(field), says(f"spec.{field} is immutable; {_ANEW}"))
        for field in ("model", "data", "optimizer", "precision", "delink", "checkpoint", "network")
    ),
    Rule(_same_or_absent("managedBy"), says(f"spec.managedBy is immutable; {_ANEW}")),
    *(
        Rule(
            f"oldSelf.suspend || {_same(field)}",
            says(f"spec.{field} is immutable while the job runs; {_SUSPEND}"),
        )
        for field in ("logging", "pod", "scheduling")
    ),
    *(
        Rule(
            f"oldSelf.suspend || {_of_each_phase(_same(f'phases[i].{field}'))}",
            says(f"spec.phases[].{field} is immutable while the job runs; {_SUSPEND}"),
        )
        for field in ("pod", "resources")
    ),
    *(
        _immutable_in_phases(field, _same_or_absent(f"phases[i].{field}"))
        for field in ("layers", "growth", "experts", "sharing", "elastic", "processesPerWorker")
    ),
    *(
        _immutable_in_phases(field, _same(f"phases[i].{field}"))
        for field in ("workers", "spares", "batch", "mixture", "parallelism", "activations", "offload", "compile")
    ),
    Rule(
        _of_each_phase(f"({_same(_BOUNDS)} || (i == size(oldSelf.phases) - 1 && {_GROWS}))"),
        says("spec.phases[].until: only step and tokens of the last phase may change, and may only grow"),
    ),
)
"""Rules on the spec."""

JOB_CHANGES: tuple[Rule, ...] = (
    Rule(
        "!has(oldSelf.status) || !has(oldSelf.status.completionTime) || self.spec.phases == oldSelf.spec.phases",
        says("spec.phases: the job has ended; to train on, create a job with spec.checkpoint.continueFrom"),
    ),
)
"""Rules on the whole job."""
