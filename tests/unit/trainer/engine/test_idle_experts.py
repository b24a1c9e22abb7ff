"""Experts to which no token of a step goes keep their state, as in the plain reference."""

import json
from typing import Any

import pytest

from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case
from tests.unit.trainer.engine.support.running import Result, sound, want

pytestmark = pytest.mark.processor_deep

_FEED_FORWARD = {"feedForward": {"size": 5, "activation": "SwiGLU"}}
"""Three matrices, so that two halves of a unit's vector differ."""
MANY = json.dumps({"experts": {"type": "TopK", "count": 64, "topK": {"perToken": 1, "size": 5}}} | _FEED_FORWARD)
"""A step of 24 tokens leaves most experts idle."""
PROTOTYPES = json.dumps({"experts": {"count": 32, "prototypes": 2}} | _FEED_FORWARD)
SKIP: dict[str, Any] = {"idle": "Skip", "clipping": "Global", "epsilon": "1e-6"}
"""With a smaller epsilon, AdamW amplifies the rounding of the tiny gradients of rare experts."""

ALONE = [Case(drawn=MANY, homes=homes, **SKIP) for homes in ("d", "h", "hD")] + [
    Case(drawn=PROTOTYPES, micro_batches=2, homes="D", keep="All", **SKIP),
    Case(drawn=MANY, part="Experts", blocks=2, homes="h", **SKIP),
    Case(drawn=MANY, expert_groups=16, homes="hD", window=1, **SKIP),
    Case(drawn=EIGHT_IN_BALANCE, homes="h", **SKIP),
]
TOGETHER = [
    *(Case(data=2, drawn=MANY, sharding=sharding, homes="dhD", **SKIP) for sharding in ("None", "Optimizer", "Full")),
    Case(data=2, expert_ranks=2, drawn=MANY, expert_groups=4, homes="hD", **SKIP),
    Case(pipeline=2, drawn=PROTOTYPES, part="Experts", blocks=1, **SKIP),
    Case(data=4, expert_ranks=2, replicas=2, drawn=MANY, sharding="Full", homes="d", **SKIP),
    Case(data=4, expert_ranks=2, drawn=MANY, sharding="Full", homes="h", **SKIP),
]
IN_BFLOAT16 = [Case(drawn=MANY, homes=homes, precision="bfloat16", **SKIP) for homes in ("d", "h", "D")]
want([*ALONE, *TOGETHER, *IN_BFLOAT16])


@pytest.mark.parametrize("case", [*ALONE, *TOGETHER], ids=lambda case: case.name)
def test_idle_experts_are_not_updated(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    found = sound(engine_results, case)
    assert_trained_alike(found, case)
    found.assert_first_moments(reference.train_with_moments(case)[2])


@pytest.mark.parametrize("case", [case for case in [*ALONE, *TOGETHER] if case.drawn == MANY], ids=lambda c: c.name)
def test_experts_that_are_always_idle_keep_every_bit(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    first = dict(reference.model_and_optimizer(case)[0].named_parameters())
    _, expected = reference.train(case)
    weights, always_idle = sound(engine_results, case).weights, 0
    for name in (name for name in first if name.endswith("experts.up.weight")):
        for expert, (before, after) in enumerate(zip(first[name], expected[name], strict=True)):
            if before.equal(after):
                always_idle += 1
                assert weights[name][expert].equal(before), f"expert {expert} of {name}"
    assert always_idle > 0


def test_idle_experts_in_bfloat16_are_the_same_in_every_home(engine_results: dict[Case, list[Result]]) -> None:
    """If weights have a copy in the compute dtype, the copy of idle experts stays as well."""
    first, *others = (sound(engine_results, case) for case in IN_BFLOAT16)
    for other in others:
        assert other.losses == first.losses
        assert all(other.weights[name].equal(weights) for name, weights in first.weights.items())
