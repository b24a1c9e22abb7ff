"""A rule in CEL, and how rules on a job, on each of its phases, and on phases that follow each other are written.

The API server evaluates them when a manifest is applied; `pseudoreal_api.spec.check` evaluates the same text for a
local run. Every rule has a message that names the fields and the values at fault. Messages are made by `format`, as the
API server takes the length of `string(integer)` for unbounded and refuses longer concatenations as too expensive.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """A CEL expression that must hold, and a CEL expression for the sentence that says why it does not."""

    rule: str
    message: str

    def to_schema(self) -> dict[str, Any]:
        return {"rule": self.rule, "messageExpression": self.message}


def says(sentence: str, *values: str) -> str:
    """A CEL expression for the sentence, with the values of these expressions in it."""
    return f"'{sentence}'.format([{', '.join(values)}])"


def on_job(holds: str, sentence: str, *values: str) -> Rule:
    return Rule(holds, says(sentence, *values))


def on_each_phase(holds: str, sentence: str, *values: str) -> Rule:
    """A rule on every phase p; the sentence speaks of the first one that breaks it."""
    message = says(f"spec.phases[%s]{sentence}", "p.name", *values)
    return Rule(f"self.phases.all(p, {holds})", f"self.phases.filter(p, !({holds})).map(p, {message})[0]")


def on_each_pair(holds: str, sentence: str, *values: str) -> Rule:
    """A rule on every phase {p} and its successor {q}. CEL macros have no index, so the indices are listed."""
    indices = "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]"

    def fill(expression: str) -> str:
        return expression.format(p="self.phases[i]", q="self.phases[i + 1]")

    message = says(f"spec.phases[%s]{sentence}", fill("{q}.name"), *map(fill, values))
    return Rule(
        f"{indices}.all(i, i + 1 >= size(self.phases) || {fill(holds)})",
        f"{indices}.filter(i, i + 1 < size(self.phases) && !({fill(holds)})).map(i, {message})[0]",
    )
