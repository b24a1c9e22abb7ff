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


@dataclass(frozen=True)
class PhaseRule(Rule):
    """Rule on each phase p, or on each phase p and its successor q. `holds` and `sentence` are expressions for one of
    them: the local library copies what an expression names, and a job may have large phases."""

    holds: str
    sentence: str
    of_pairs: bool = False


def says(sentence: str, *values: str) -> str:
    """Return a CEL expression for the sentence, with the values of the given expressions inserted."""
    return f"'{sentence}'.format([{', '.join(values)}])"


def on_job(holds: str, sentence: str, *values: str) -> Rule:
    return Rule(holds, says(sentence, *values))


def on_each_phase(holds: str, sentence: str, *values: str) -> Rule:
    """Return a rule on every phase p; the message names the first phase at fault."""
    message = says(f"spec.phases[%s]{sentence}", "p.name", *values)
    return PhaseRule(
        f"self.phases.all(p, {holds})", f"self.phases.filter(p, !({holds})).map(p, {message})[0]", holds, message
    )


def on_each_pair(holds: str, sentence: str, *values: str) -> Rule:
    """Return a rule on every phase {p} and its successor {q}. CEL macros have no index, so the indices are listed."""
    indices = "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14]"
    message = says(f"spec.phases[%s]{sentence}", "{q}.name", *values)

    def fill(expression: str) -> str:
        return expression.format(p="self.phases[i]", q="self.phases[i + 1]")

    return PhaseRule(
        f"{indices}.all(i, i + 1 >= size(self.phases) || {fill(holds)})",
        f"{indices}.filter(i, i + 1 < size(self.phases) && !({fill(holds)})).map(i, {fill(message)})[0]",
        holds.format(p="p", q="q"),
        message.format(p="p", q="q"),
        of_pairs=True,
    )
