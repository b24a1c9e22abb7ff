"""The plan in the docstring of the records equals a real plan."""

import re
from dataclasses import replace

from pseudoreal_trainer.plan import records
from pseudoreal_trainer.plan.expert_parallel import PassPart
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import evaluation_plan, step_plan
from pseudoreal_trainer.plan.records import Leg, Record


def _shown() -> list[list[Record]]:
    """Return the records of each plan in the docstring; a plan is a paragraph with records."""
    assert records.__doc__ is not None
    return [plan for paragraph in records.__doc__.split("\n\n") if (plan := _read(paragraph))]


def _read(text: str) -> list[Record]:
    return [
        getattr(records, kind)(*map(_field, fields.split(", ") if fields else ()))
        for kind, fields in re.findall(r"\b([A-Z][A-Za-z]+)\(([a-z\d, ]*)\)", text)
    ]


def _field(word: str) -> object:
    return int(word) if word.isdigit() else Leg(word)


def test_documented_plan_equals_the_plan_that_is_made() -> None:
    layout = Layout((0, 1), pipeline=1, data=2, micro_batches=2, sharding="Full")
    whole, _, _ = _shown()
    assert whole == list(step_plan(layout)[0])


def test_documented_expert_parallel_pass_equals_the_pass_that_is_made() -> None:
    layout = Layout((0,), pipeline=1, data=2, micro_batches=2, layer_experts=(0,), expert_ranks=2)
    _, spread, in_groups = _shown()
    assert spread == _parts(layout)
    assert in_groups == _parts(replace(layout, expert_groups=2))


def _parts(layout: Layout) -> list[Record]:
    """Return the parts of the first layer's pass."""
    return [record for record in evaluation_plan(layout)[0] if isinstance(record, PassPart) and record.position == 1]
