from collections.abc import Callable
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.from_config import phase_layout, phase_sizes


def test_layout_has_every_field_of_the_phase(job_body: dict[str, Any], config: Callable[..., PhaseConfig]) -> None:
    job_body["spec"]["optimizer"]["clipping"] = {"mode": "PerUnit"}
    job_body["spec"]["model"] |= {"vocabularySize": 50_304, "embeddings": "Tied"}
    job_body["spec"]["phases"][1] |= {
        "sharing": {"blocks": 2, "pattern": "Segment"},
        "workers": 6,
        "batch": {"sequences": 12, "microBatches": 2},
        "parallelism": {"pipeline": 2, "schedule": "1F1B", "stateSharding": "Gradients", "replicas": 3},
        "activations": {"home": "Host"},
        "offload": {"home": "Host", "homes": [{"unit": "blocks.1", "home": "Disk"}], "window": 3},
    }
    assert phase_layout(config(1), "cpu") == Layout(
        layer_blocks=(0, 0, 1, 1),
        pipeline=2,
        data=3,
        micro_batches=2,
        replicas=3,
        order="1F1B",
        sharding="Gradients",
        homes=("Host", "Host", "Disk"),
        window=3,
        keep="Inputs",
        stash=True,
        clipping="PerUnit",
        ends_are_one=True,
        vocabulary=50_304,
        loss_chunk=2**28 // (50_304 * 8),
    )


def test_sizes_in_the_precision_of_the_phase(job_body: dict[str, Any], config: Callable[..., PhaseConfig]) -> None:
    found = []
    for compute in ("bfloat16", "float32", "float64"):
        job_body["spec"]["precision"]["compute"] = compute
        sizes = phase_sizes(config(1), "cpu")
        assert not sizes.has_z_loss
        found.append((sizes.compute_bytes, sizes.master_bytes))
        assert sizes.checkpoint_buffer == 256 << 20
        # 6 sequences in two micro-batches over two data ranks: a rank gets two and one.
        assert (sizes.micro_batch, sizes.max_tokens(Layout((0,), 1, 2, 1))) == (3, 2 * 16)
    assert found == [(2, 4), (4, 4), (8, 8)]
    job_body["spec"]["optimizer"]["zLoss"] = "1e-5"
    assert phase_sizes(config(1), "cpu").has_z_loss


def test_a_vocabulary_of_bytes_is_never_cut(job_body: dict[str, Any], config: Callable[..., PhaseConfig]) -> None:
    """It would be cut only for a micro-batch with an unrealistic number of tokens per rank."""
    for compute, tokens in (("bfloat16", 262_144), ("float32", 262_144), ("float64", 131_072)):
        job_body["spec"]["precision"]["compute"] = compute
        assert phase_layout(config(0), "cpu").loss_chunk == tokens


def test_chunks_of_the_loss_have_room_in_the_device_or_its_budget(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig]
) -> None:
    """The budget comes before the memory: it decides homes, so all ranks need the same chunks even if their GPUs
    differ."""
    job_body["spec"]["precision"]["compute"] = "bfloat16"
    for budget, memory, most in ((None, 80 << 30, 1 << 30), (None, 40 << 30, 512 << 20), ("32Gi", 80 << 30, 512 << 20)):
        job_body["spec"]["phases"][0]["offload"] = {"budget": {"device": budget}} if budget else {}
        assert phase_layout(config(0), "accelerator", memory).loss_chunk == most // (256 * 4)
        assert phase_layout(config(0), "cpu", memory).loss_chunk == (256 << 20) // (256 * 4)


def test_a_phase_that_does_not_fit_is_an_invalid_job(
    job_body: dict[str, Any], config: Callable[..., PhaseConfig]
) -> None:
    job_body["spec"]["phases"][0]["offload"] = {"budget": {"device": "1Ki"}}
    with pytest.raises(InvalidJobError, match=r"offload.budget.device is 1.00 KiB, but pipeline rank 0 needs"):
        phase_layout(config(0), "cpu")
