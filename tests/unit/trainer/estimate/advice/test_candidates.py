"""Arms of the trials scaled to other models, and the phases of a job that they become."""

from typing import Any

import pytest
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.estimate.advice.candidates import (
    NotApplicable,
    candidate_of,
    describe,
    kind_of,
    name_of,
    with_phases,
)
from pseudoreal_trainer.estimate.advice.evidence import Stage, Trial
from pydantic import ValidationError

STUDIED, EXPERTS = 12, 8
SIZES = {"hiddenSize": 8, "sequenceLength": 8, "attention": {"heads": 2}, "feedForward": {"size": 8}}


def model(layers: int, experts: int | None = None) -> Model:
    mixture = {"experts": {"type": "TopK", "count": experts, "topK": {"perToken": 1}}} if experts else {}
    return Model.model_validate(SIZES | {"layers": layers} | mixture)


def trial(*stages: dict[str, Any], experts: int | None = None) -> Trial:
    return Trial.model_validate(
        {
            "study": "experts" if experts else "dense",
            "width": 24,
            "parameters": 1,
            "tokens": 1,
            "arm": "arm",
            "stages": [{"layers": STUDIED, "blocks": STUDIED, "experts": experts} | stage for stage in stages],
            "seeds": 1,
            "speedUpInTokens": {"mean": 1},
            "lossDifference": {"mean": 0},
        }
    )


REAL = {"until": 1}


@pytest.mark.parametrize(
    ("first", "layers", "expected"),
    [
        ({"blocks": 1}, 32, (32, 1)),
        ({"blocks": 4}, 12, (12, 4)),
        ({"blocks": 4}, 32, (32, 8)),  # a third is 10.7; of 8 and 16, 8 is nearer by its share
        ({"blocks": 4}, 96, (96, 32)),
        ({"layers": 4, "blocks": 4}, 24, (8, 8)),
        ({"layers": 1, "blocks": 1}, 24, (1, 1)),
        ({"layers": 4, "blocks": 1}, 24, (8, 1)),
        ({"layers": 6, "blocks": 2}, 24, (12, 4)),
    ],
)
def test_stages_keep_their_share_of_the_layers(first: dict[str, Any], layers: int, expected: tuple[int, int]) -> None:
    found, last = candidate_of(trial({"until": 0.3} | first, REAL), "Sharing", model(layers)).stages
    assert (found.until, found.layers, found.blocks) == (0.3, *expected)
    assert (last.until, last.layers, last.blocks) == (1, layers, layers)


def test_stages_keep_their_share_of_the_experts() -> None:
    upcycled = trial({"until": 0.3, "experts": 2}, REAL, experts=EXPERTS)
    found, last = candidate_of(upcycled, "Growth", model(6, experts=64)).stages
    assert (found.experts, last.experts) == (16, 64)


@pytest.mark.parametrize(
    ("stages", "experts", "of"),
    [
        ([{"until": 0.3, "blocks": 4}, REAL], None, model(13)),  # 13 is prime: the divisor nearest to a third is 13
        ([{"until": 0.3, "layers": 4, "blocks": 4}, REAL], None, model(1)),
        ([{"until": 1, "blocks": 1}], None, model(1)),
        ([{"until": 0.3, "experts": 2}, REAL], EXPERTS, model(12, experts=1)),
    ],
)
def test_arm_whose_first_stage_would_be_the_whole_model_does_not_apply(
    stages: list[dict[str, Any]], experts: int | None, of: Model
) -> None:
    arm = trial(*stages, experts=experts)
    kind = kind_of(arm.stages)
    assert kind is not None
    with pytest.raises(NotApplicable, match=f"spec.model, with {of.layers} layers"):
        candidate_of(arm, kind, of)


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        ([REAL], None),
        ([{"until": 1, "blocks": 1}], "Throughout"),
        ([{"until": 1, "blocks": 1, "sharesExperts": True}], "Throughout"),
        ([{"until": 0.3, "blocks": 1}, REAL], "Sharing"),
        ([{"until": 0.1, "layers": 4, "blocks": 1}, {"until": 0.3, "layers": 4, "blocks": 4}, REAL], "Sharing"),
        ([{"until": 0.3, "layers": 4, "blocks": 4}, REAL], "Growth"),
        ([{"until": 0.3, "experts": 2}, REAL], "Growth"),
    ],
)
def test_kind_of_an_arm(stages: list[dict[str, Any]], kind: str | None) -> None:
    assert kind_of(trial(*stages, experts=EXPERTS).stages) == kind


def test_stages_in_words() -> None:
    stages = [
        Stage(until=0.1, layers=6, blocks=1, shares_experts=True, experts=8),
        Stage(until=0.3, layers=6, blocks=2, shares_experts=True, experts=8),
        Stage(until=1, layers=6, blocks=6, experts=8),
    ]
    assert describe(stages) == (
        "6 layers of 8 experts with 1 set of experts to 10 %, then 6 layers of 8 experts with 2 sets of experts to"
        " 30 %, then 6 layers of 8 experts"
    )
    assert describe([Stage(until=0.5, layers=1, blocks=1), Stage(until=1, layers=4, blocks=2)]) == (
        "1 layer to 50 %, then 4 layers with 2 blocks"
    )


@pytest.mark.parametrize(
    ("stages", "name"),
    [
        ([REAL], "unshared"),
        ([{"until": 1, "blocks": 4}], "4 blocks throughout"),
        ([{"until": 1, "blocks": 1, "sharesExperts": True}], "1 set of experts throughout"),
        ([{"until": 0.1, "blocks": 1}, {"until": 0.3, "blocks": 4}, REAL], "1 block to 10 %, 4 blocks to 30 %"),
        ([{"until": 0.3, "layers": 4, "blocks": 4}, REAL], "4 of 12 layers to 30 %"),
        ([{"until": 0.3, "layers": 4, "blocks": 1}, REAL], "4 of 12 layers with 1 block to 30 %"),
        ([{"until": 0.3, "experts": 2}, REAL], "2 of 8 experts to 30 %"),
    ],
)
def test_name_of_an_arm(stages: list[dict[str, Any]], name: str) -> None:
    assert name_of(trial(*stages, experts=EXPERTS).stages) == name


@pytest.mark.parametrize(
    ("delink", "expected"),
    [
        (None, {"noise": "0.1"}),
        ({"noise": "0", "warmupSteps": 3}, {"noise": "0.1", "warmupSteps": 3}),
        ({"noise": "0.02"}, {"noise": "0.02"}),
    ],
)
def test_copies_of_experts_get_noise(delink: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    phases = [{"name": "real", "until": {"step": 5}}]
    body = {"spec": {"phases": phases} | ({"delink": delink} if delink else {})}
    few = Stage(until=0.1, layers=4, blocks=4, experts=2)
    real = Stage(until=1, layers=4, blocks=4, experts=8)
    assert with_phases(body, [few, real], [10, 100])["spec"]["delink"] == expected
    assert with_phases(body, [real], [100])["spec"].get("delink") == delink


def test_phases_are_copies_of_the_last_phase() -> None:
    body = {
        "kind": "x",
        "spec": {
            "a": 1,
            "phases": [
                {"name": "first", "sharing": {"blocks": 3}, "workers": 9},
                {"name": "real", "until": {"step": 5, "validationLoss": "1"}, "workers": 2, "batch": {"sequences": 8}},
            ],
        },
    }
    stages = [
        Stage(until=0.1, layers=4, blocks=1, shares_experts=True, experts=8),
        Stage(until=0.3, layers=2, blocks=2, experts=2),
        Stage(until=1, layers=4, blocks=4, experts=8),
    ]
    found = with_phases(body, stages, [10, 30, 100])
    assert (found["spec"]["a"], found["spec"]["delink"]) == (1, {"noise": "0.1"})
    common = {"workers": 2, "batch": {"sequences": 8}}
    assert found["spec"]["phases"] == [
        common | {"name": "pseudo-1", "until": {"tokens": 10}, "sharing": {"blocks": 1, "parts": ["Experts"]}},
        common | {"name": "small-2", "until": {"tokens": 30}, "layers": 2, "experts": 2},
        common | {"name": "real", "until": {"tokens": 100}},
    ]
    assert body["spec"]["phases"][0]["name"] == "first", "the job itself is unchanged"  # type: ignore[index]


def test_homes_of_single_units_stay_with_the_whole_model() -> None:
    offload = {"home": "Host", "window": 3, "homes": [{"unit": "blocks.3", "home": "Disk"}]}
    body = {"spec": {"phases": [{"name": "real", "until": {"step": 5}, "offload": offload}]}}
    stages = [Stage(until=0.1, layers=4, blocks=1), Stage(until=1, layers=4, blocks=4)]
    pseudo, real = with_phases(body, stages, [10, 100])["spec"]["phases"]
    assert pseudo["offload"] == {"home": "Host", "window": 3}
    assert real["offload"] == offload


def test_first_phase_never_has_the_name_of_the_last() -> None:
    body = {"spec": {"phases": [{"name": "pseudo", "until": {"step": 5}}]}}
    stages = [Stage(until=0.1, layers=4, blocks=1), Stage(until=1, layers=4, blocks=4)]
    names = [phase["name"] for phase in with_phases(body, stages, [10, 100])["spec"]["phases"]]
    assert names == ["pseudo-first", "pseudo"]


@pytest.mark.parametrize(
    "ends", [(0.3, 0.3), (0.5, 0.3, 1), (0.3, 0.9)], ids=["twice the same", "descending", "not all tokens"]
)
def test_stages_of_a_trial_end_in_order(ends: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="each must end after the one before, the last one at 1"):
        trial(*({"until": end} for end in ends))
