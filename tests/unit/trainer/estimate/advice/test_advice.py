"""Advice for a job with seconds that a table gives, computed by hand; and with the planner's, beside `plan_phase`."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.check import check_job
from pseudoreal_trainer.cgroups import threads_of
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.advice.advice import Advice, Adviser
from pseudoreal_trainer.estimate.advice.certainty import sentences
from pseudoreal_trainer.estimate.advice.costs import Costs, PhaseCost
from pseudoreal_trainer.estimate.advice.evidence import Evidence, Trial, comparable_trials
from pseudoreal_trainer.estimate.advice.intervals import Interval
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, read_profile

ROOT = Path(__file__).parents[5]
EVIDENCE = Evidence.model_validate_json((ROOT / "tests" / "data" / "evidence.json").read_bytes()).trials
GPUS = read_profile(ROOT / "examples" / "hardware" / "gpu-cluster.yaml")
TOKENS_PER_STEP = 6 * 16


class Table(Costs):
    """Costs with given seconds of a step, by the number of blocks."""

    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__(None)
        self._seconds = seconds

    def of(self, config: PhaseConfig) -> PhaseCost:
        return PhaseCost(config, "table", False, self._seconds[config.sharing.blocks], "passes", 1000, ())


@pytest.fixture
def body(job_body: dict[str, Any]) -> dict[str, Any]:
    """A job of 4 layers, 2 workers in its last phase and 96 tokens in a step."""
    job_body["metadata"].pop("uid")
    job_body["spec"]["precision"] = {"compute": "bfloat16"}
    return job_body


def advise(body: dict[str, Any], seconds: dict[int, float], tokens: int = 96_000, trials: Any = EVIDENCE) -> Advice:
    return Adviser(body, Table(seconds)).advise(trials, tokens=tokens)


def test_seconds_and_speed_ups_follow_by_hand(body: dict[str, Any]) -> None:
    """1,000 real steps of 4 s. Delinked at 30 %: 300 steps of 1 s and 700 of 4 s, of which an interval from 0.96 to
    1.04 makes 741.7 and 661.5. Sharing throughout: 2,500 steps of 1 s."""
    found = advise(body, {1: 1.0, 4: 4.0})
    assert found.unshared.seconds == pytest.approx(4000)
    delinked, shared = found.plan("delinked at 30 %"), found.plan("shared throughout")
    assert delinked is not None
    assert delinked.speed_up is not None
    assert shared is not None
    assert shared.speed_up is not None
    assert delinked.seconds == pytest.approx(300 + 700 * 4)
    assert delinked.speed_up.mean == pytest.approx(4000 / 3100)
    assert delinked.speed_up.low == pytest.approx(4000 / (300 + 4 * (1000 / 0.96 - 300)))
    assert delinked.speed_up.high == pytest.approx(4000 / (300 + 4 * (1000 / 1.04 - 300)))
    assert shared.seconds == pytest.approx(2500)
    assert shared.speed_up.mean == pytest.approx(1.6)
    assert delinked.ends == (28_800, 96_000)
    assert shared.ends == (240_000,)


@pytest.mark.parametrize(
    ("pseudo_seconds", "verdict"),
    [
        (4.0, "Level"),  # as dear as a real step: 0.96 to 1.04
        (2.5, "Take"),  # 1.08 to 1.18
        (1.0, "Take"),  # 1.23 to 1.36; sharing throughout, 4 * 0.4 = 1.6, ends with a smaller model
        (6.0, "None"),  # 0.83 to 0.89
    ],
)
def test_the_price_of_a_pseudo_step_decides(body: dict[str, Any], pseudo_seconds: float, verdict: str) -> None:
    found = advise(body, {1: pseudo_seconds, 4: 4.0}, trials=_without_growth())
    assert found.decision.verdict == verdict
    assert found.recommended.name == ("delinked at 30 %" if verdict == "Take" else "unshared")


def _without_growth() -> list[Trial]:
    return [trial for trial in EVIDENCE if "grown" not in trial.arm]


def test_recommended_job_has_the_phases_and_is_valid(body: dict[str, Any]) -> None:
    body["spec"]["phases"][1]["activations"] = {"keep": "All"}
    found = advise(body, {1: 2.5, 4: 4.0}, trials=_without_growth())
    assert found.recommended.body["spec"]["phases"] == [
        body["spec"]["phases"][1] | {"name": "pseudo", "until": {"tokens": 28_800}, "sharing": {"blocks": 1}},
        body["spec"]["phases"][1] | {"name": "real", "until": {"tokens": 96_000}},
    ]
    check_job(found.recommended.body)


@pytest.mark.parametrize(("parameters", "expected"), [(90, 100), (250, 100), (400, 1000), (5000, 1000)])
def test_nearest_size_is_nearest_by_its_ratio(parameters: int, expected: int) -> None:
    """Between 100 and 1,000 the middle is 316."""
    sizes = [EVIDENCE[1].model_copy(update={"parameters": size}) for size in (1000, 100)]
    assert [trial.parameters for trial in comparable_trials(sizes, "dense", parameters)] == [expected]


def test_arms_are_compared_at_the_size_that_most_of_them_have() -> None:
    """At 100 there are three arms with intervals, at 1,000 two. Arms that are not at 100: d, and e, whose nearer trial
    has no interval."""
    alone = Interval(mean=1)
    sizes = [
        *(EVIDENCE[1].model_copy(update={"arm": arm, "parameters": 100}) for arm in "abc"),
        *(EVIDENCE[1].model_copy(update={"arm": arm, "parameters": 1000}) for arm in "ad"),
        EVIDENCE[1].model_copy(update={"arm": "b", "parameters": 1000, "speed_up_in_tokens": alone}),
        EVIDENCE[1].model_copy(update={"arm": "e", "parameters": 1000, "speed_up_in_tokens": alone}),
        EVIDENCE[1].model_copy(update={"arm": "e", "parameters": 500}),
    ]
    found = {trial.arm: trial.parameters for trial in comparable_trials(sizes, "dense", 1000)}
    assert found == {"a": 100, "b": 100, "c": 100, "d": 1000, "e": 500}


def test_trial_with_an_interval_is_read_rather_than_a_nearer_one() -> None:
    found = comparable_trials(EVIDENCE, "dense", 147_456)
    assert [trial.parameters for trial in found if trial.arm == "delinked at 30 %"] == [82_944]


def test_arm_of_the_same_model_at_another_width_is_no_candidate(body: dict[str, Any]) -> None:
    found = advise(body, {1: 1.0, 4: 4.0})
    assert found.plan("small model") is None
    assert "small model" not in found.left_out


def test_growth_has_fewer_layers_at_first(body: dict[str, Any]) -> None:
    """A third of 6 layers: 2 layers of 2 s to 30 %, then 6 s, with the mean speed-up 0.98 in tokens."""
    body["spec"]["model"]["layers"] = 6
    plan = advise(body, {1: 1.0, 2: 2.0, 6: 6.0}).plan("grown from 4 layers at 30 %")
    assert plan is not None
    assert [phase.get("layers") for phase in plan.body["spec"]["phases"]] == [2, None]
    assert [cost.config.model.layers for cost in plan.costs] == [2, 6]
    assert plan.seconds == pytest.approx(300 * 2 + (1000 / 0.98 - 300) * 6)


def test_upcycling_has_fewer_experts_at_first(body: dict[str, Any]) -> None:
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 16, "topK": {"perToken": 2}}
    plan = advise(body, {1: 1.0, 4: 4.0}).plan("upcycled from 2 experts at 30 %")
    assert plan is not None
    assert [cost.config.model.experts.count for cost in plan.costs if cost.config.model.experts] == [4, 16]
    assert plan.body["spec"]["delink"] == {"noise": "0.1"}


def test_other_kind_of_model_has_its_own_trials(body: dict[str, Any]) -> None:
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 8, "topK": {"perToken": 2}}
    found = advise(body, {1: 1.0, 4: 4.0})
    assert found.study == "experts"
    assert {plan.name for plan in found.plans} <= {trial.arm for trial in EVIDENCE if trial.study == "experts"}
    assert found.plan("experts delinked at 30 %") is not None


def test_parameters_are_the_matrix_weights_that_a_token_meets(body: dict[str, Any]) -> None:
    """4 layers, width 16, MLP of 32: four matrices of attention and two of the MLP. With top 2 of 8 experts: the
    router, and two experts' matrices."""
    assert advise(body, {1: 1, 4: 4}).parameters == 4 * (4 * 16 * 16 + 2 * 16 * 32)
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 8, "topK": {"perToken": 2}}
    assert advise(body, {1: 1, 4: 4}).parameters == 4 * (4 * 16 * 16 + 16 * 8 + 2 * 2 * 16 * 32)


def test_days_are_days_of_unshared_training(body: dict[str, Any]) -> None:
    """A day has 86,400 s: 21,600 steps of 4 s."""
    found = Adviser(body, Table({1: 1.0, 4: 4.0})).advise(EVIDENCE, days=1)
    assert found.tokens == 21_600 * TOKENS_PER_STEP


def test_arm_that_the_job_may_not_have_is_left_out_with_the_reason(body: dict[str, Any]) -> None:
    """Layers with and without experts share no block."""
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 8, "topK": {"perToken": 2}, "denseLayers": [0]}
    body["spec"]["phases"].pop(0)
    blocks = EVIDENCE[1].model_copy(update={"study": "experts"})
    found = advise(body, {1: 1.0, 4: 4.0}, trials=[blocks])
    assert "spec.model.experts.denseLayers shares a block with layer 1" in found.left_out["delinked at 30 %"]
    assert found.decision.verdict == "NoEvidence"


@pytest.mark.parametrize(
    ("tokens", "words"), [(95, "less than a step, which has 96; give a larger --tokens"), (300, None)]
)
def test_budget_without_a_step_is_refused(body: dict[str, Any], tokens: int, words: str | None) -> None:
    if words:
        with pytest.raises(InvalidJobError, match=words):
            advise(body, {1: 1.0, 4: 4.0}, tokens)
    else:
        assert "would have 90 tokens" in advise(body, {1: 1.0, 4: 4.0}, tokens).left_out["delinked at 30 %"]


def test_job_that_cannot_be_trained_without_sharing_is_refused(body: dict[str, Any]) -> None:
    body["spec"]["checkpoint"]["startFrom"] = {
        "type": "HuggingFace",
        "huggingFace": {"path": "weights"},
        "blocks": {"type": "Listed", "layers": [0]},
    }
    with pytest.raises(InvalidJobError, match=r"training without sharing, but spec\.checkpoint\.startFrom\.blocks"):
        advise(body, {1: 1.0, 4: 4.0})


def test_arms_are_bounded(body: dict[str, Any]) -> None:
    arms = [EVIDENCE[1].model_copy(update={"arm": f"arm {number}"}) for number in range(51)]
    assert len(advise(body, {1: 1.0, 4: 4.0}, trials=arms[:50]).plans) == 50
    with pytest.raises(InvalidJobError, match="51 arms are more than the 50"):
        advise(body, {1: 1.0, 4: 4.0}, trials=arms)


def test_without_trials_the_advice_is_none(body: dict[str, Any]) -> None:
    found = advise(body, {4: 4.0}, trials=[])
    assert (found.decision.verdict, found.recommended.name) == ("NoEvidence", "unshared")
    assert "no trial of this kind of model" in found.decision.reason
    assert sentences(found, ())[0].startswith("seconds are predictions")


def test_certainty_names_seeds_sizes_distance_and_schedule(body: dict[str, Any]) -> None:
    text = "\n".join(sentences(advise(body, {1: 4.0, 4: 4.0}, tokens=163_840, trials=_without_growth()), EVIDENCE))
    for words in (
        "delinked at 30 %: 5 seeds, 82,944 parameters in the layers, 1,658,880 tokens; speed-up in tokens 1.00 (0.96 to"
        " 1.04)",
        "final loss +0.0000 (-0.0100 to +0.0100)",
        "at other sizes: 147,456 parameters: 1.50 (one seed, no interval)",
        "the job's model has 8,192 such parameters, 0.099 times the trial's: an extrapolation",
        "the trial read 20 tokens for each parameter, the job reads 20",
        "spec.optimizer.schedule is Cosine",
        "spec.optimizer.learningRate 0.01",
    ):
        assert words in text


def test_other_parts_of_the_layers_than_in_the_trial_are_named(body: dict[str, Any]) -> None:
    """4 of 12 layers are a third; of 4 layers, 1 is a quarter, and of 6, 2 are a third."""
    grown = [EVIDENCE[3]]
    seconds = {1: 1.0, 2: 2.0, 4: 4.0, 6: 6.0}
    words = "layers of the first stages are 0.25 of all where the trial had 0.33"
    assert words in sentences(advise(body, seconds, trials=grown), ())
    body["spec"]["model"]["layers"] = 6
    assert "of all where the trial had" not in "".join(sentences(advise(body, seconds, trials=grown), ()))


@pytest.mark.parametrize(("ratio", "far"), [(9.9, False), (10.1, True)])
def test_model_ten_times_larger_is_an_extrapolation(body: dict[str, Any], ratio: float, far: bool) -> None:
    near = EVIDENCE[1].model_copy(update={"parameters": round(8192 / ratio)})
    text = "\n".join(sentences(advise(body, {1: 4.0, 4: 4.0}, trials=[near]), (near,)))
    assert ("an extrapolation" in text) == far
    assert ("near to what was measured" in text) == (not far)


def test_weights_that_are_trained_already_are_another_matter(body: dict[str, Any]) -> None:
    body["spec"]["checkpoint"]["startFrom"] = {"type": "HuggingFace", "huggingFace": {"path": "weights"}}
    text = "\n".join(sentences(advise(body, {1: 4.0, 4: 4.0}), EVIDENCE))
    assert "nothing of that kind was measured" in text


def _config(body: dict[str, Any], index: int) -> PhaseConfig:
    return phase_config(check_job(body), index, execution=1, work_directory=".", offload_directory=".")


def test_seconds_are_those_of_plan(body: dict[str, Any]) -> None:
    config = _config(body, 1)
    expected = plan_phase(config, "accelerator", GPUS, threads_of(1))
    found = Costs(GPUS).of(config)
    assert found.step_seconds == expected.timeline.seconds
    assert found.peak_device_bytes == expected.report.peak_device_bytes
    assert found.fits


def _profile(device_bytes: int, host_bytes: int | None = None) -> HardwareProfile:
    return GPUS.model_copy(update={"device_bytes": device_bytes, "host_bytes": host_bytes})


def test_phase_that_does_not_fit_is_planned_with_its_state_elsewhere(body: dict[str, Any]) -> None:
    config = _config(body, 1)
    peak = Costs(GPUS).of(config).peak_device_bytes
    assert peak is not None
    found = Costs(_profile(peak - 1)).of(config)
    assert found.fits
    assert (found.moved, found.config.offload.home) == (True, "Host")
    on_disk = Costs(_profile(peak - 1, host_bytes=1)).of(config)
    assert not on_disk.fits, "the buffers of a state on disk are on the host"
    assert "the hardware profile's device_bytes" in " ".join(on_disk.reasons)


def test_state_elsewhere_comes_back_where_the_device_has_room(body: dict[str, Any]) -> None:
    body["spec"]["phases"][1]["offload"] = {"home": "Host"}
    found = Costs(GPUS).of(_config(body, 1))
    assert (found.moved, found.config.offload.home) == (True, "Device")
    unknown = GPUS.model_copy(update={"device_bytes": None})
    kept = Costs(unknown).of(_config(body, 1))
    assert (kept.moved, kept.config.offload.home) == (False, "Host"), "nobody knows whether the device has room"


def test_recommended_job_has_the_homes_in_which_it_was_planned(body: dict[str, Any]) -> None:
    body["spec"]["phases"][1]["offload"] = {
        "home": "Host",
        "window": 3,
        "homes": [{"unit": "blocks.3", "home": "Disk"}],
    }
    found = Adviser(body, Costs(GPUS)).advise(_without_growth(), tokens=96_000)
    plan = found.plan("delinked at 30 %")
    assert plan is not None
    assert [phase["offload"] for phase in plan.body["spec"]["phases"]] == [{"home": "Device", "window": 3}] * 2
    assert found.unshared.body["spec"]["phases"][0]["offload"] == {"home": "Device", "window": 3}
    check_job(plan.body)


def test_nulls_mean_the_default(body: dict[str, Any]) -> None:
    body["spec"]["model"]["experts"] = {"type": "TopK", "count": 16, "topK": {"perToken": 2}}
    body["spec"]["phases"][1]["offload"] = None
    for delink in (None, {"noise": None}):
        body["spec"]["delink"] = delink
        plan = advise(body, {1: 1.0, 4: 4.0}).plan("upcycled from 2 experts at 30 %")
        assert plan is not None
        assert plan.body["spec"]["delink"] == {"noise": "0.1"}


def test_job_that_shares_to_the_end_is_told_what_the_advice_is_about(body: dict[str, Any]) -> None:
    body["spec"]["phases"][1]["sharing"] = {"blocks": 2}
    text = "\n".join(sentences(advise(body, {1: 1.0, 4: 4.0}), EVIDENCE))
    assert "the last phase of the job shares weights; the advice is about the same model without sharing" in text


def test_layout_auto_is_resolved(body: dict[str, Any]) -> None:
    body["spec"]["phases"][1]["parallelism"] = {"layout": "Auto"}
    body["spec"]["phases"][1]["batch"] = {"sequences": 6}
    found = Costs(GPUS).of(_config(body, 1))
    assert found.config.parallelism.layout == "Given"
    assert found.fits
    unfit = Costs(_profile(1, 1)).of(_config(body, 1))
    assert not unfit.fits
    assert unfit.reasons == (f"no layout of 2 ranks fits the machine of the profile {GPUS.name}",)


def test_model_that_does_not_fit_is_said_so(body: dict[str, Any]) -> None:
    found = Adviser(body, Costs(_profile(1, 1))).advise(EVIDENCE, tokens=96_000)
    assert found.decision.verdict == "DoesNotFit"
    assert "the hardware profile's device_bytes is 1 B" in found.decision.reason
    assert all(plan.speed_up is None for plan in found.plans)
    with pytest.raises(InvalidJobError, match="gives no number of tokens, because unshared training does not fit"):
        Adviser(body, Costs(_profile(1, 1))).advise(EVIDENCE, days=1)


def test_each_phase_is_planned_once(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []

    def count(config: PhaseConfig, *arguments: Any) -> Any:
        planned.append(config.sharing.blocks)
        return plan_phase(config, *arguments)

    monkeypatch.setattr("pseudoreal_trainer.estimate.advice.costs.plan_phase", count)
    Adviser(body, Costs(GPUS)).advise(_without_growth(), tokens=96_000)
    assert sorted(planned) == [1, 4]


def test_phases_of_other_models_have_costs_of_their_own(body: dict[str, Any]) -> None:
    costs, config = Costs(GPUS), _config(body, 1)
    wider = config.model_copy(update={"model": config.model.model_copy(update={"hidden_size": 4096})})
    first, second = (costs.of(one).step_seconds for one in (config, wider))
    assert first is not None
    assert second is not None
    assert second > first


def test_profile_is_the_jobs_own_without_an_option(body: dict[str, Any], tmp_path: Path) -> None:
    own = tmp_path / "hardware.yaml"
    own.write_text(yaml.safe_dump(GPUS.model_dump(mode="json") | {"name": "mine"}))
    assert Adviser(body, Costs(None)).advise([], tokens=96_000).machine == "assumed CPUs"
    body["spec"]["phases"][1]["parallelism"] = {"hardware": str(own), "layout": "Auto"}
    body["spec"]["phases"][1]["batch"] = {"sequences": 6}
    assert Adviser(body, Costs(None)).advise([], tokens=96_000).machine == "mine"
