"""Job files of a trial: which arms, which model, whose text."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.check import check_job
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.advice import Adviser
from pseudoreal_trainer.estimate.advice.costs import Costs
from pseudoreal_trainer.estimate.advice.evidence import Evidence, Trial
from pseudoreal_trainer.estimate.advice.trial import SEEDS, STEPS, TrialJob, trial_jobs, trial_seconds

EVIDENCE = Evidence.model_validate_json((Path(__file__).parents[4] / "data" / "evidence.json").read_bytes()).trials
TOKENS = STEPS * 16 * 128


@pytest.fixture
def body(job_body: dict[str, Any]) -> dict[str, Any]:
    job_body["metadata"].pop("uid")
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["model"] |= {
        "family": "Llama3",
        "layers": 24,
        "hiddenSize": 128,
        "sequenceLength": 1024,
        "attention": {"heads": 8, "keyValueHeads": 2, "rotary": {"base": "500000"}},
        "feedForward": {"size": 344},
        "vocabularySize": 1000,
    }
    return job_body


def jobs(body: dict[str, Any], trials: tuple[Trial, ...] = EVIDENCE) -> list[TrialJob]:
    return trial_jobs(Adviser(body, Costs(None)).advise(trials, tokens=10**9), Path("/home/user"))


def of(found: list[TrialJob], label: str) -> dict[str, Any]:
    spec: dict[str, Any] = next(job for job in found if job.label == label).body["spec"]
    return spec


def test_trial_has_unshared_training_twice_and_the_arms_of_each_kind(body: dict[str, Any]) -> None:
    found = jobs(body)
    labels = Counter(job.label for job in found)
    assert labels.keys() >= {"unshared", "unshared-half", "sharing-1", "throughout-1"}
    assert set(labels.values()) == {len(SEEDS)}
    assert len({job.file for job in found}) == len(found)
    assert len({job.body["metadata"]["name"] for job in found}) == len(found)
    assert {job.body["spec"]["data"]["seed"] for job in found} == set(SEEDS)


def test_arms_have_the_same_tokens_and_unshared_training_half_of_them_too(body: dict[str, Any]) -> None:
    found = jobs(body)
    ends = {job.label: job.body["spec"]["phases"][-1]["until"]["tokens"] for job in found}
    assert ends.pop("unshared-half") == TOKENS // 2
    assert set(ends.values()) == {TOKENS}
    pseudo, real = of(found, "sharing-1")["phases"]
    assert (pseudo["sharing"], pseudo["until"]["tokens"]) == ({"blocks": 1}, TOKENS * 3 // 10)
    assert "sharing" not in real
    assert [phase["sharing"] for phase in of(found, "throughout-1")["phases"]] == [{"blocks": 1}]


def test_at_most_two_arms_that_share_are_tried_the_fastest_first(body: dict[str, Any]) -> None:
    arms = [
        EVIDENCE[1].model_copy(
            update={
                "arm": f"at {until}",
                "stages": (EVIDENCE[1].stages[0].model_copy(update={"until": until}), EVIDENCE[1].stages[1]),
                "speed_up_in_tokens": EVIDENCE[1].speed_up_in_tokens.model_copy(update={"mean": mean}),
            }
        )
        for until, mean in ((0.1, 1.0), (0.2, 1.03), (0.4, 1.02))
    ]
    found = jobs(body, tuple(arms))
    firsts = [of(found, f"sharing-{number}")["phases"][0]["until"]["tokens"] / TOKENS for number in (1, 2)]
    assert firsts == [pytest.approx(0.2), pytest.approx(0.4)]
    assert "sharing-3" not in {job.label for job in found}


def test_model_is_small_and_of_the_jobs_form(body: dict[str, Any]) -> None:
    model = of(jobs(body), "unshared")["model"]
    assert (model["layers"], model["hiddenSize"], model["sequenceLength"]) == (12, 32, 128)
    assert (model["family"], model["vocabularySize"]) == ("Llama3", 1000)
    assert model["attention"] | {"heads": 4, "keyValueHeads": 2, "bias": "None"} == model["attention"]
    assert model["feedForward"] == {"size": 86, "activation": "SwiGLU", "bias": "None"}


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (
            {
                "type": "TopK",
                "count": 64,
                "topK": {"perToken": 6, "size": 64, "sharedExperts": 2, "auxiliaryLoss": "0.01"},
                "denseLayers": [0],
            },
            {
                "type": "TopK",
                "count": 8,
                "topK": {"perToken": 2, "size": 16, "sharedExperts": 1, "auxiliaryLoss": "0.01"},
            },
        ),
        ({"count": 64, "prototypes": 4}, {"type": "Prototypes", "count": 8, "prototypes": 2, "capacityFactor": "1.25"}),
        ({"count": 6, "prototypes": 3}, {"type": "Prototypes", "count": 6, "prototypes": 3}),
    ],
)
def test_experts_are_few_and_of_the_jobs_form(
    body: dict[str, Any], experts: dict[str, Any], expected: dict[str, Any]
) -> None:
    body["spec"]["model"]["experts"] = experts
    body["spec"]["phases"].pop(0)
    found = of(jobs(body), "unshared")["model"]["experts"]
    top_k = expected.pop("topK", {})
    assert found | expected == found
    assert found.get("topK", {}) | top_k == found.get("topK", {})
    assert found.get("denseLayers", []) == []


def test_text_is_the_jobs_own_without_its_volume(body: dict[str, Any]) -> None:
    body["spec"]["data"] |= {
        "path": "/data",
        "volume": {"persistentVolumeClaim": {"claimName": "corpus"}},
        "sources": [{"name": "web", "maxEpochs": 2}],
        "tokenizer": {"type": "File", "path": "tokenizer"},
        "validation": {
            "sequences": 512,
            "everySteps": 7,
            "sets": [{"name": "held-out"}],
            "samples": {"prompts": ["The"]},
        },
    }
    data = of(jobs(body), "unshared")["data"]
    assert data["path"] == "/data"
    assert data["sources"][0]["name"] == "web"
    assert data["tokenizer"] == {"type": "File", "path": "tokenizer"}
    assert (data["validation"]["everySteps"], data["validation"]["sequences"]) == (STEPS, 512)
    assert "volume" not in data
    assert "samples" not in data["validation"]


def test_relative_path_starts_from_the_jobs_file(body: dict[str, Any]) -> None:
    body["spec"]["data"]["path"] = "corpus/kjv"
    assert of(jobs(body), "unshared")["data"]["path"] == "/home/user/corpus/kjv"


def test_schedule_is_that_of_the_trials(body: dict[str, Any]) -> None:
    body["spec"]["optimizer"] |= {"schedule": "Cosine", "beta2": "0.99"}
    optimizer = of(jobs(body), "sharing-1")["optimizer"]
    assert (optimizer["schedule"], optimizer["decayFraction"], optimizer["finalFraction"]) == (
        *("WarmupStableDecay", "0.2"),
        "0",
    )
    assert optimizer["beta2"] == "0.99"


def test_jobs_are_valid(body: dict[str, Any]) -> None:
    for job in jobs(body):
        check_job(job.body)


def test_seconds_are_the_sum_over_all_steps(body: dict[str, Any]) -> None:
    found = jobs(body)
    one = [job for job in found if job.label == "unshared" and job.seed == 1]
    half = [job for job in found if job.label == "unshared-half" and job.seed == 1]
    costs = Costs(None)
    assert trial_seconds(costs, one) == pytest.approx(2 * trial_seconds(costs, half))
    assert trial_seconds(costs, [*one, *half]) == pytest.approx(1.5 * trial_seconds(costs, one))


def test_seconds_of_a_delinked_run_are_120_pseudo_steps_and_280_real_ones(body: dict[str, Any]) -> None:
    (job,) = [job for job in jobs(body) if job.label == "sharing-1" and job.seed == 1]
    costs = Costs(None)
    configs = [
        phase_config(check_job(job.body), index, execution=1, work_directory=".", offload_directory=".")
        for index in range(2)
    ]
    pseudo, real = (costs.of(config).step_seconds or 0 for config in configs)
    assert trial_seconds(costs, [job]) == pytest.approx(120 * pseudo + 280 * real)


def test_without_arms_there_is_no_trial(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidJobError, match="there is no arm to try for this job"):
        jobs(body, ())
