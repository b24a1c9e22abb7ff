"""Arms whose sharing no job has train as jobs do."""

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_trainer.model.reference import Transformer

from benchmarks.method.arms import ARMS, REMEDIES, Arm, Stage, Study
from benchmarks.method.chain import Link, Run, decays
from benchmarks.method.plain import owner, train_plainly
from benchmarks.method.training import Place, _checkpointed, train
from tests.unit.benchmarks.method.support.tiny import random_texts, scale_of_steps

_STEPS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return random_texts(tmp_path_factory.mktemp("plain"))


def _arm(name: str, study: Study) -> Arm:
    return next(arm for arm in (*ARMS[study], *REMEDIES[study]) if arm.name == name)


def _decay(name: str, study: Study) -> Link:
    run = Run(study, _arm(name, study), 16, seed=5, rate=0.01, text="text", scale=scale_of_steps(study, _STEPS))
    return decays(run, (1.0,))[0]


def _trained_by_jobs(decay: Link, place: Place) -> Transformer:
    for link in decay.ancestry():
        train(link, place)
    config = phase_config(
        decay.job(place.data(decay)),
        len(decay.stages) - 1,
        execution=1,
        work_directory=str(place.folder(decay)),
        offload_directory="",
    )
    return _checkpointed(config)


def _trained_plainly(decay: Link, place: Place) -> Transformer:
    parent = None
    for link in decay.ancestry():
        folder = place.scratch / "plain" / link.key
        folder.mkdir(parents=True)
        model, _, seconds = train_plainly(link, place.data(link), folder, parent)
        assert len(seconds) == link.end - link.begin
        parent = folder
    return model


@pytest.mark.parametrize(
    ("study", "name"),
    [
        ("dense", "4 blocks, delinked at 30 %"),
        ("dense", "delinked at 30 %"),
        ("experts", "unshared"),
    ],
)
def test_an_arm_that_jobs_can_train_ends_with_their_weights(place: Place, study: Study, name: str) -> None:
    """The engine and this loop sum in different orders, and Adam's first steps magnify the difference. Experts have
    other initial weights where blocks are shared, because the number of their unit is another."""
    torch.set_num_threads(1)
    decay = _decay(name, study)
    plain, ours = (trained(decay, place).state_dict() for trained in (_trained_plainly, _trained_by_jobs))
    assert plain.keys() == ours.keys()
    for key, weight in ours.items():
        np.testing.assert_allclose(plain[key], weight, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("study", ["dense", "experts"])
def test_layers_share_what_their_arm_says(place: Place, study: Study) -> None:
    tied = [arm for arm in REMEDIES[study] if arm.stages[0].ties]
    assert tied
    for arm in tied:
        first = _decay(arm.name, study).ancestry()[0]
        model, *_ = train_plainly(first, place.data(first), place.scratch, None)
        for name, weight in model.named_parameters():
            if name.startswith("blocks.1."):
                zeroth = model.get_parameter(name.replace("blocks.1.", "blocks.0."))
                assert torch.equal(weight, zeroth) == (owner(arm.stages[0], 1, name[9:]) == 0), name


@pytest.mark.parametrize(
    ("ties", "name", "owners"),
    [
        ("Middle", "attention_norm.weight", [0, 1, 2, 3, 3, 3, 3, 3, 3, 9, 10, 11]),
        ("Matrices", "query.weight", [0] * 12),
        ("Matrices", "norm.weight", [*range(12)]),
        ("Matrices", "router.weight", [*range(12)]),
        ("Matrices", "experts.up.weight", [0] * 12),
    ],
)
def test_owners_of_weights(ties: str, name: str, owners: list[int]) -> None:
    stage = Stage(0.3, 12, 1, ties=ties)  # type: ignore[arg-type]
    assert [owner(stage, layer, name) for layer in range(12)] == owners
