"""Muon in every layout that keeps matrices whole: against the definition, and to the bit between layouts.

The reference orthogonalizes by a singular value decomposition (`tests/support/muon.py`); the engine iterates. float64:
within 1e-12. float32: the same bits in all layouts that add gradients in the same order, because a matrix is updated as
a whole, by the same operations.
"""

import json
from dataclasses import replace

import pytest
import torch

from tests.unit.trainer.engine.support.agreement import assert_trained_alike
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, Case, each
from tests.unit.trainer.engine.support.running import Result, sound, want

WIDE = json.dumps({"hiddenSize": 36, "attention": {"heads": 2}})
"""A block's matrices take 6,912 elements, three pages and 768 elements: second moments start inside of a matrix."""
MANY = json.dumps(
    {
        "experts": {"type": "TopK", "count": 24, "topK": {"perToken": 1, "size": 5}},
        "feedForward": {"size": 5, "activation": "SwiGLU"},
    }
)
"""A step of 24 tokens leaves some experts idle."""
MULTIPLIERS = (("Embedding", "0.1", "0"), ("Attention", "2", "0.5"), ("Norms", "3", "1"), ("Experts", "0.3", "2"))
ORDERS = ["Layered", "GPipe", "1F1B", "Interleaved"]

CLOSE = [
    *each(order=ORDERS, micro_batches=4),
    *each(homes=["h", "D"], window=1, drawn=["", WIDE]),
    *each(clipping=["Global", "PerUnit"], homes=["d", "hD"], drawn=WIDE),
    *each(multipliers=MULTIPLIERS, options=["all biases and norms", "Qwen3MoE"], homes="dhD", clipping="Global"),
    *each(blocks=2, pattern=["Cycle", "Segment"], homes="hD", window=1, activation="SwiGLU"),
    *each(options=["Llama3", "in balance"], homes="hD", window=1, blocks=2, clipping="PerUnit"),
    Case(part="Experts", options="Qwen3MoE", blocks=2, pattern="Segment", homes="Dhd"),
    Case(tied=True, homes="D", exclusions=("Embedding",)),
    Case(keep="All", homes="D", order="1F1B", layers=1),
    Case(drawn=EIGHT_IN_BALANCE, expert_groups=4, homes="hD", window=1),
    *each(drawn=MANY, micro_batches=1, homes=["d", "hD"], clipping="Global", idle=["Update", "Skip"], epsilon="1e-6"),
    *each(data=2, homes=["d", "hDd"], clipping=["None", "Global"], drawn=WIDE),
    *each(data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, homes=["d", "hD"]),
    *each(pipeline=2, order=ORDERS, homes="dhD", clipping="Global"),
    Case(pipeline=2, blocks=2, homes="h"),
    Case(pipeline=2, tied=True, homes="hD", clipping="PerUnit"),
    Case(pipeline=2, order="GPipe", blocks=2, pattern="Segment", homes="D", stash=True),
    Case(pipeline=2, data=2, expert_ranks=2, drawn=EIGHT_IN_BALANCE, homes="hD", clipping="Global"),
]
CLOSE = [replace(case, algorithm="Muon") for case in CLOSE]

PLAIN = Case(algorithm="Muon", precision="float32", clipping="Global", norm="0.9", drawn=WIDE)
OF_EXPERTS = replace(PLAIN, drawn=EIGHT_IN_BALANCE)
PROTOTYPES = Case(algorithm="Muon", precision="float32", experts=6, prototypes=2)
ALIKE = {
    PLAIN: [
        *(replace(PLAIN, homes=homes, window=window) for homes in ("h", "D") for window in (1, 2)),
        *(replace(PLAIN, order=order, homes="dhD") for order in ORDERS[1:3]),
        replace(PLAIN, homes="D", order="1F1B", keep="All"),
        replace(PLAIN, homes="hD", stash=True, speculates=True),
        *(replace(PLAIN, pipeline=2, order=order, homes="hdD") for order in ORDERS),
    ],
    OF_EXPERTS: [
        *(replace(OF_EXPERTS, homes=homes) for homes in ("h", "D")),
        replace(OF_EXPERTS, pipeline=2, homes="dhD"),
    ],
    # The norm is summed unit by unit, so with groups the clip factor may differ in its last bit: no clipping here.
    PROTOTYPES: [replace(PROTOTYPES, expert_groups=groups, homes="hD", window=1) for groups in (2, 3)],
    replace(PLAIN, clipping="None"): [
        replace(PLAIN, clipping="None", homes="D"),
        replace(PLAIN, clipping="None", pipeline=2, order="Interleaved", homes="h"),
    ],
}
"""Layout -> layouts with its bits."""
want([*CLOSE, *ALIKE, *(case for cases in ALIKE.values() for case in cases)])


@pytest.mark.parametrize("case", CLOSE, ids=lambda case: case.name)
def test_muon_agrees_with_its_definition(case: Case, engine_results: dict[Case, list[Result]]) -> None:
    assert_trained_alike(sound(engine_results, case), case)


@pytest.mark.processor_deep
@pytest.mark.parametrize(
    ("case", "plain"), [(case, plain) for plain, cases in ALIKE.items() for case in cases], ids=lambda case: case.name
)
def test_muon_has_the_same_bits_in_all_layouts(
    case: Case, plain: Case, engine_results: dict[Case, list[Result]]
) -> None:
    found, expected = (sound(engine_results, one) for one in (case, plain))
    assert found.losses == expected.losses
    for mine, theirs in ((found.weights, expected.weights), (found.first_moments, expected.first_moments)):
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            assert torch.equal(mine[name], values), name
