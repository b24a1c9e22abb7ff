"""Models that the benchmark of mixtures compares."""

from pathlib import Path

import pytest
from pseudoreal_api.resolved.resolve import phase_config

from benchmarks.moe.experiments import EXPERIMENTS, PSEUDO_STEPS, ROUTINGS, STEPS, Experiment, job


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_its_jobs_can_be_trained_and_have_equal_steps(experiment: Experiment, tmp_path: Path) -> None:
    body = job(experiment, 0, "corpus")
    configs = [
        phase_config(body, index, execution=1, work_directory=str(tmp_path), offload_directory=str(tmp_path))
        for index in range(len(body.spec.phases))
    ]
    assert [config.phase_steps for config in configs] == [*([PSEUDO_STEPS] if len(configs) > 1 else []), STEPS]


@pytest.mark.parametrize("experiment", ROUTINGS, ids=lambda experiment: experiment.name)
def test_a_token_meets_as_much_in_all_models(experiment: Experiment) -> None:
    """The experts also have the same number of parameters."""
    model = job(experiment, 0, "corpus").spec.model
    if model.experts is None:
        assert model.feed_forward.size == 256
        return
    choices = model.experts.top_k.per_token if model.experts.top_k else model.experts.prototypes
    assert choices * model.expert.size == 256
    assert model.experts.count * model.expert.size == 8 * 256
