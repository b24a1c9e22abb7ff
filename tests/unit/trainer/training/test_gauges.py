"""Speed and memory fields of metrics.jsonl."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.training.metrics import phase_gauges

from tests.support.checkpoints import metrics


def test_teraflops_per_second_are_counted_per_rank(job_body: Any, config: Any) -> None:
    job_body["spec"]["phases"][1]["until"]["step"] = 20
    one = phase_gauges(config(0), Ranks(0, 1, torch.device("cpu")))
    two = phase_gauges(config(1), Ranks(0, 1, torch.device("cpu")))
    assert one.operations() == 2 * two.operations(), (
        "the second phase has the same batch on two workers, so each rank does half the operations"
    )
    assert one.teraflops_per_second(2.0) == one.operations() / 2e12
    assert one.utilisation(2.0) is None, "the peak of a CPU is unknown"
    assert replace(one, peak=one.operations()).utilisation(2.0) == 0.5


def test_operations_of_masked_attention_count_within_documents(job_body: Any, config: Any) -> None:
    """The job has steps of 6 sequences of 16 tokens, and 4 layers with 16 query features over all heads."""
    gauges = phase_gauges(config(0), Ranks(0, 1, torch.device("cpu")))
    assert gauges.operations(Counts(96, {None: 6 * 16**2})) == gauges.operations()
    # Documents of half a sequence have half of the query-key pairs. Each pair costs two products (queries with keys,
    # weights with values), once in the forward pass and twice in the backward pass.
    left_out = 4 * 3 * 2 * 16 * (6 * 16**2 // 2)
    assert gauges.operations(Counts(90, {None: 12 * 8**2})) == gauges.operations() - left_out
    job_body["spec"]["model"]["attention"]["window"] = {"size": 3, "layers": [1, 2]}
    windowed = phase_gauges(config(0), Ranks(0, 1, torch.device("cpu")))
    counts = Counts(96, {None: 6 * 16**2, 3: 6 * 3 * (2 * 16 - 3)})
    assert windowed.operations(counts) == windowed.operations() < gauges.operations()


def test_each_line_of_the_metrics_has_speed_and_memory(config: Any, train: Any) -> None:
    train(config(0))
    gauges = phase_gauges(config(0), Ranks(0, 1, torch.device("cpu")))
    tokens = 6 * 16
    for line in metrics(config(0)):
        rate = gauges.operations() * line["tokens_per_second"] / tokens / 1e12
        assert line["teraflops_per_second"] == pytest.approx(rate, rel=1e-12)
        assert (line["mfu"], line["device_bytes"]) == (None, None)
        assert line["host_bytes"] > 50 << 20, "torch alone takes more than 50 MiB"


def test_without_global_clipping_no_gradient_norm_is_reported(job_body: Any, config: Any, train: Any) -> None:
    job_body["spec"]["optimizer"]["clipping"] = {"mode": "PerUnit"}
    train(config(0))
    assert {line["gradient_norm"] for line in metrics(config(0))} == {None}
