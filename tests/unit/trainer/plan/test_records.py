"""The plan that the docstring of the records shows is one that is made."""

import re

from pseudoreal_trainer.plan import records
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan


def test_the_plan_in_the_docstring_is_the_plan_that_is_made() -> None:
    assert records.__doc__ is not None
    shown = [
        getattr(records, kind)(*map(int, re.findall(r"\d+", fields)))
        for kind, fields in re.findall(r"\b([A-Z][a-z]+)\(([\d, ]*)\)", records.__doc__)
    ]
    layout = Layout((0, 1), pipeline=1, data=2, micro_batches=2, sharding="Full")
    assert shown == list(step_plan(layout)[0])
