"""Rules across fields, written once in CEL.

The API server evaluates them when a manifest is applied; `pseudoreal_api.check` evaluates the same text for a local
run. Every rule has a message that names the fields and the values at fault.
"""

from dataclasses import dataclass
from typing import Any

from pseudoreal_api.run_spec import RESERVED_ENV, RESERVED_ENV_PREFIXES

# Children are named <job>-<phase>-a<attempt> and <job>-<phase>-delink-a<attempt>; their pods' host names append
# -<index> and must be DNS labels of at most 63 characters.
NAME_BUDGET = 63 - len("--delink-a999-9999")


@dataclass(frozen=True)
class Rule:
    """A CEL expression that must hold, and a CEL expression for the sentence that says why it does not."""

    rule: str
    message: str

    def to_schema(self) -> dict[str, Any]:
        return {"rule": self.rule, "messageExpression": self.message}


def _each_phase(holds: str, sentence: str) -> Rule:
    """A rule on every phase p; the sentence speaks of the first phase that breaks it."""
    broken = f"self.phases.filter(p, !({holds}))"
    return Rule(
        f"self.phases.all(p, {holds})",
        f"{broken}.map(p, 'spec.phases[' + p.name + ']' + {sentence})[0]",
    )


def _each_pair(holds: str, sentence: str) -> Rule:
    """A rule on every phase p and its successor q (CEL macros have no index, so the indices are listed)."""
    indices = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14].filter(i, i + 1 < size(self.phases))"

    def bind(macro: str, body: str) -> str:
        return f"[self.phases[i]].{macro}(p, [self.phases[i + 1]].{macro}(q, {body}))"

    broken = f"{indices}.filter(i, {bind('exists', f'!({holds})')})"
    return Rule(
        f"{indices}.all(i, {bind('all', holds)})",
        f"{broken}.map(i, 'spec.phases[' + self.phases[i + 1].name + ']' + {bind('map', sentence)}[0][0])[0]",
    )


def _blocks(phase: str) -> str:
    return f"(has({phase}.sharing) ? {phase}.sharing.blocks : self.model.layers)"


def _refines() -> str:
    same_pattern = "!has(p.sharing) || !has(q.sharing) || p.sharing.pattern == q.sharing.pattern"
    trivial = f"{_blocks('p')} == 1 || {_blocks('q')} == self.model.layers"
    return f"{_blocks('q')} % {_blocks('p')} == 0 && ({trivial} || {same_pattern})"


_RESERVED = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_IS_RESERVED = " || ".join(
    [f"e.name in [{_RESERVED}]"] + [f"e.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
)

SPEC_RULES = (
    Rule(
        "self.model.hidden % (2 * self.model.heads) == 0",
        "'spec.model.hidden ' + string(self.model.hidden) + ' must be a multiple of twice spec.model.heads '"
        " + string(self.model.heads) + ': rotary positions turn pairs of a head\\'s features'",
    ),
    Rule(
        "!has(self.model.moe) || self.model.moe.experts % self.model.moe.prototypes == 0",
        "'spec.model.moe.experts ' + string(self.model.moe.experts)"
        " + ' must be a multiple of spec.model.moe.prototypes ' + string(self.model.moe.prototypes)",
    ),
    Rule(
        "double(self.data.validation.fraction) > 0.0 && double(self.data.validation.fraction) < 1.0",
        "'spec.data.validation.fraction ' + self.data.validation.fraction + ' must lie between 0 and 1, both excluded'",
    ),
    Rule(
        "double(self.optimizer.learningRate) > 0.0",
        "'spec.optimizer.learningRate ' + self.optimizer.learningRate + ' must be greater than 0'",
    ),
    Rule(
        "double(self.optimizer.finalFraction) <= 1.0",
        "'spec.optimizer.finalFraction ' + self.optimizer.finalFraction + ' must be at most 1'",
    ),
    Rule(
        "double(self.optimizer.beta1) < 1.0 && double(self.optimizer.beta2) < 1.0",
        "'spec.optimizer.beta1 ' + self.optimizer.beta1 + ' and spec.optimizer.beta2 ' + self.optimizer.beta2"
        " + ' must be less than 1'",
    ),
    Rule(
        "self.phases.all(p, self.phases.exists_one(q, q.name == p.name))",
        "'spec.phases: the name ' + self.phases.filter(p, !self.phases.exists_one(q, q.name == p.name))[0].name"
        " + ' is used by more than one phase; names must differ'",
    ),
    _each_phase(
        f"self.model.layers % {_blocks('p')} == 0",
        "'.sharing.blocks ' + string(p.sharing.blocks) + ' must divide spec.model.layers ' + string(self.model.layers)",
    ),
    _each_phase(
        "p.parallelism.pipeline <= self.model.layers",
        "'.parallelism.pipeline ' + string(p.parallelism.pipeline) + ' must be at most spec.model.layers '"
        " + string(self.model.layers)",
    ),
    _each_phase(
        "p.batch.sequences % p.batch.microBatches == 0",
        "'.batch.microBatches ' + string(p.batch.microBatches) + ' must divide sequences ' + string(p.batch.sequences)",
    ),
    _each_phase(
        "has(p.until.steps) || has(p.until.tokens)",
        "'.until has neither steps nor tokens; set one of them, so that the phase ends even if the loss'"
        " + ' is never reached'",
    ),
    _each_pair(
        _refines(),
        f"'.sharing must refine that of phase ' + p.name + ': its ' + string({_blocks('q')})"
        f" + ' blocks must be a multiple of ' + string({_blocks('p')}) + ', in the same pattern'",
    ),
    _each_pair(
        "!has(p.until.steps) || !has(q.until.steps) || p.until.steps < q.until.steps",
        "'.until.steps ' + string(q.until.steps) + ' must be greater than the ' + string(p.until.steps)"
        " + ' of phase ' + p.name + ': steps count from the start of the job'",
    ),
    _each_pair(
        "!has(p.until.tokens) || !has(q.until.tokens) || p.until.tokens < q.until.tokens",
        "'.until.tokens ' + string(q.until.tokens) + ' must be greater than the ' + string(p.until.tokens)"
        " + ' of phase ' + p.name + ': tokens count from the start of the job'",
    ),
    Rule(
        "!has(self.data.volume) || self.data.path.startsWith('/')",
        "'spec.data.path ' + self.data.path + ' must be absolute, as spec.data.volume is mounted there'",
    ),
    Rule(
        f"self.pod.env.all(e, !({_IS_RESERVED}))",
        f"'spec.pod.env: the name ' + self.pod.env.filter(e, {_IS_RESERVED})[0].name"
        " + ' is reserved for the operator; remove it'",
    ),
)

METADATA_RULES = (
    Rule(
        f"self.spec.phases.all(p, size(self.metadata.name) + size(p.name) <= {NAME_BUDGET})",
        f"self.spec.phases.filter(p, size(self.metadata.name) + size(p.name) > {NAME_BUDGET})"
        ".map(p, 'metadata.name ' + self.metadata.name + ' and the phase name ' + p.name + ' have '"
        " + string(size(self.metadata.name) + size(p.name)) + ' characters together; at most"
        f" {NAME_BUDGET} fit into the host names of the pods')[0]",
    ),
    Rule(
        "!self.metadata.name.contains('.')",
        "'metadata.name ' + self.metadata.name + ' must not contain a dot: it becomes part of DNS labels'",
    ),
)
