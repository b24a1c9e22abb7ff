"""CEL rules, and builders for rules on a job, on each of its phases, and on pairs of consecutive phases.

The API server evaluates the rules when a manifest is applied, as part of a policy (`pseudoreal_api.publish.policy`);
`pseudoreal_api.spec.check` evaluates the same text for a local run, and for the operator. Every rule has a message with
the fields and values at fault.
"""

from dataclasses import dataclass

SEPARATOR = " | "
"""Text between the sentences where they must be one line."""


@dataclass(frozen=True)
class Rule:
    """CEL expression for the required condition, and CEL expression for the sentence shown if it is false."""

    rule: str
    message: str


def says(sentence: str, *values: str) -> str:
    """Return a CEL expression for the sentence, with the values of the given expressions inserted."""
    return f"'{sentence}'.format([{', '.join(values)}])"


def on_job(holds: str, sentence: str, *values: str) -> Rule:
    return Rule(holds, says(sentence, *values))


def on_each_phase(holds: str, sentence: str, *values: str) -> Rule:
    """Return a rule on every phase p; the message names the first phase at fault."""
    message = says(f"spec.phases[%s]{sentence}", "p.name", *values)
    return Rule(f"self.phases.all(p, {holds})", f"self.phases.filter(p, !({holds})).map(p, {message})[0]")


def on_each_pair(holds: str, sentence: str, *values: str) -> Rule:
    """Return a rule on every phase {p} and its successor {q}. CEL macros have no index, so the indices are listed."""
    indices = "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14]"

    def fill(expression: str) -> str:
        return expression.format(p="self.phases[i]", q="self.phases[i + 1]")

    message = says(f"spec.phases[%s]{sentence}", fill("{q}.name"), *map(fill, values))
    return Rule(
        f"{indices}.all(i, i + 1 >= size(self.phases) || {fill(holds)})",
        f"{indices}.filter(i, i + 1 < size(self.phases) && !({fill(holds)})).map(i, {message})[0]",
    )
