from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.model.reference import build_model
from pseudoreal_trainer.training.schedule import learning_rate
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.support.checkpoints import assert_same, metrics, newest_of
from tests.support.routers import Routers
from tests.unit.trainer.checkpoint.support.by_hand import save
from tests.unit.trainer.data.support.slow_permutation import permuted

STEPS = 6


Figures = dict[str, list[float]]
"""Key of metrics.jsonl -> its value in each step."""


def _reference(config: PhaseConfig, text: bytes) -> tuple[Figures, dict[str, torch.Tensor]]:
    """Train in a plain PyTorch loop; return the metrics of all steps, and the final weights."""
    sequence, batch = config.model.sequence_length, config.batch
    model = build_model(config.model, config.sharing, config.data.seed, torch.float64)
    optimizer = adamw(model.parameters(), config.optimizer, 0.0)
    samples = (len(text) - 1) // sequence
    order = np.array([permuted(index, samples, config.data.seed, 0) for index in range(samples)])
    routers, found = Routers(model), Figures()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step + 1, config.total_steps)
        optimizer.zero_grad()
        routers.begin()
        total = z_total = torch.zeros((), dtype=torch.float64)
        for micro in np.split(order[step * batch.sequences : (step + 1) * batch.sequences], batch.micro_batches):
            windows = torch.tensor([list(text[w * sequence : (w + 1) * sequence + 1]) for w in micro])
            logits = model(windows[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, windows[:, 1:].flatten(), reduction="sum")
            z_loss = float(config.optimizer.z_loss) * logits.exp().sum(-1).log().square().sum()
            torch.autograd.backward((loss + z_loss + routers.take()) / (batch.sequences * sequence))
            total, z_total = total + loss.detach(), z_total + z_loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        routers.balance()
        tokens = batch.sequences * sequence
        figures = {"loss": total.item() / tokens, "gradient_norm": norm, "z_loss": z_total.item() / tokens}
        if routers.counts:
            shares = [(counts.max() / counts.double().mean()).item() for counts in routers.counts]
            figures |= {"expert_load_max": max(shares), "expert_load_mean": sum(shares) / len(shares)}
            figures["idle_experts"] = torch.stack(routers.counts).eq(0).double().mean().item()
            figures |= {"router_entropy": routers.entropy, "dropped_tokens": 0.0}
            figures["auxiliary_loss"] = routers.auxiliary_loss / tokens
        for key, figure in figures.items():
            found.setdefault(key, []).append(figure)
    return found, model.state_dict()


EXPERTS = {
    "type": "TopK",
    "count": 5,
    "topK": {"perToken": 2, "score": "Sigmoid", "biasUpdateRate": "0.02", "auxiliaryLoss": "0.1"},
}
OF_EXPERTS = {
    *("expert_load_max", "expert_load_mean", "idle_experts", "auxiliary_loss", "dropped_tokens", "router_entropy"),
}


@pytest.mark.parametrize(
    ("model", "z_loss"),
    [
        ({}, "0"),
        ({"vocabularySize": 300, "embeddings": "Tied", "logitSoftCap": "5"}, "1e-3"),
        ({"experts": EXPERTS}, "1e-3"),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_a_plain_loop(
    model: dict[str, Any], z_loss: str, job_body: Any, config: Any, corpus_folder: Path, train: Any
) -> None:
    job_body["spec"]["model"] |= model
    job_body["spec"]["optimizer"]["zLoss"] = z_loss
    phase = config(0)
    train(phase)
    text = b"".join((corpus_folder / name).read_bytes() for name in ("a.txt", "b.txt"))
    expected, weights = _reference(phase, text[: len(text) - round(len(text) / 10)])
    for key, figures in expected.items():
        found = [line[key] for line in metrics(phase)]
        # The engine sums the norm unit by unit, so the last bit may differ.
        wanted = pytest.approx(figures, rel=1e-12 if key == "gradient_norm" else 1e-13)
        assert found == ([None] * STEPS if (key, z_loss) == ("z_loss", "0") else wanted), key
    assert all(line[key] is None for line in metrics(phase) for key in OF_EXPERTS - {*expected})
    assert {*newest_of(phase).names} == {*weights}
    for name, array in newest_of(phase).whole().items():
        # AdamW divides by the root of the second moment, which amplifies small differences.
        np.testing.assert_allclose(array, weights[name].numpy(), rtol=0, atol=1e-12 if model else 1e-13)


def test_the_loss_falls_over_both_phases(job_body: Any, config: Any, train_job: Any) -> None:
    job_body["spec"]["phases"][0]["until"]["step"] = 20
    job_body["spec"]["phases"][1]["until"]["step"] = 60
    message = train_job("work")
    lines = metrics(config(1))
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert [line["global_cursor"] for line in lines] == list(range(6, 366, 6))
    assert lines[-1]["tokens"] == message.tokens == 60 * 6 * 16
    assert message.validation_loss < message.start_validation_loss - 0.3


@pytest.mark.parametrize("model", [{}, {"embeddings": "Tied"}, {"experts": EXPERTS}], ids=str)
def test_delinking_does_not_change_the_validation_loss(
    model: dict[str, Any], job_body: Any, config: Any, train_job: Any
) -> None:
    job_body["spec"]["model"] |= model
    message = train_job("work")
    end = CheckpointStore(Path(config(0).work_directory), "11111111-2222").committed("pseudo")[-1]
    assert message.start_validation_loss == end.validation_loss


@pytest.mark.parametrize(("stop_after", "experts"), [(1, None), (3, None), (8, None), (3, EXPERTS)])
def test_a_job_that_was_stopped_ends_as_if_it_had_not_been(
    stop_after: int, experts: Any, job_body: Any, config: Any, train: Any
) -> None:
    job_body["spec"]["model"]["experts"] = experts
    job_body["spec"]["phases"][0]["until"]["step"] = 11
    whole, parts = config(0, "whole"), config(0, "parts")
    train(whole)
    calls = count(1)
    stopped = train(parts, stop=lambda: next(calls) >= stop_after)
    assert (stopped.outcome, stopped.step, stopped.exit_code) == ("Yielded", stop_after, 75)
    resumed = train(parts)
    assert (resumed.outcome, resumed.step) == ("Succeeded", 11)
    assert_same(newest_of(whole), newest_of(parts))
    volatile = {"tokens_per_second", "teraflops_per_second", "seconds", "remaining_seconds", "waited_seconds"}
    volatile |= {"step_seconds", "waits"}
    volatile |= {"host_bytes", "checkpoint"}
    assert [{k: v for k, v in line.items() if k not in volatile} for line in metrics(whole)] == [
        {k: v for k, v in line.items() if k not in volatile} for line in metrics(parts)
    ]
    assert resumed.start_validation_loss == newest_of(whole).manifest.start_validation_loss


def test_a_crash_goes_on_from_the_last_checkpoint(job_body: Any, config: Any, train: Any) -> None:
    """Steps 6 to 8 were done but not saved: the next execution repeats them, and metrics.jsonl lists each once."""
    job_body["spec"]["phases"][0]["until"]["step"] = 11
    whole, crashed = config(0, "whole"), config(0, "crashed")
    train(whole)
    calls = count(1)

    def crash() -> bool:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        train(crashed, stop=crash)
    assert [line["step"] for line in metrics(crashed)] == list(range(1, 9))
    assert newest_of(crashed).manifest.step == 5
    train(crashed)
    assert [line["step"] for line in metrics(crashed)] == list(range(1, 12))
    assert_same(newest_of(whole), newest_of(crashed))


def test_a_finished_phase_is_only_reported(config: Any, train: Any) -> None:
    first = train(config(0))
    assert train(config(0, execution=2)) == first.model_copy(update={"execution": 2})


@pytest.mark.parametrize(
    ("until", "step"), [({"step": 5}, 5), ({"tokens": 6 * 16 * 3}, 3), ({"step": 50, "validationLoss": "5.0"}, 4)]
)
def test_a_phase_ends_at_the_first_bound(until: Any, step: int, job_body: Any, config: Any, train: Any) -> None:
    """The validation loss is measured every four steps and is below 5 at the first measurement."""
    job_body["spec"]["phases"][0]["until"] = until
    job_body["spec"]["phases"][1]["until"] = {"step": 100}
    message = train(config(0))
    assert (message.outcome, message.step) == ("Succeeded", step)
    assert newest_of(config(0)).manifest.phase_complete


def test_a_loss_that_is_not_finite_ends_the_phase_without_a_checkpoint(config: Any, train: Any) -> None:
    train(config(0), stop=lambda: True)
    store = CheckpointStore(Path(config(0).work_directory), "11111111-2222")
    save(
        store,
        newest_of(config(0)).manifest,
        {name: np.full_like(a, np.nan) for name, a in newest_of(config(0)).whole().items()},
    )
    with pytest.raises(TrainingError, match=r"loss of step 2 is nan; lower spec.optimizer.learningRate"):
        train(config(0))
    assert [m.step for m in store.committed()] == [1]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_other_precisions_train_and_keep_masters_in_float32(
    compute: str, job_body: Any, config: Any, train: Any
) -> None:
    job_body["spec"]["precision"] = {"compute": compute}
    message = train(config(0))
    assert message.validation_loss < message.start_validation_loss
    assert {array.dtype for array in newest_of(config(0)).whole().values()} == {np.dtype("float32")}


def test_old_checkpoints_are_removed_while_training(job_body: Any, config: Any, train: Any) -> None:
    job_body["spec"]["checkpoint"] |= {"everySteps": 1, "keepLast": 2}
    train(config(0))
    kept: list[Head] = CheckpointStore(Path(config(0).work_directory), "11111111-2222").committed()
    assert [(m.step, m.phase_complete) for m in kept] == [(4, False), (5, False), (6, True)]


@pytest.mark.parametrize(
    ("products", "told"),
    [
        ("Compute", None),
        ("Float8", "of rounded numbers in the compute dtype: the device has no products in float8 with scaled rows"),
        ("MXFP8", "of rounded numbers in the compute dtype: the device has no products in float8 with scaled blocks"),
    ],
)
def test_start_of_a_phase_says_how_products_in_float8_are_computed(
    products: str, told: str | None, job_body: Any, config: Any, train: Any
) -> None:
    job_body["spec"]["precision"]["products"] = products
    with structlog.testing.capture_logs() as said:
        train(config(0), stop=lambda: True)
    assert [line["float8_products"] for line in said if line["event"] == "phase_started"] == [told]
