"""A rank that fails by itself reports its error and ends, even if the other ranks are waiting for it."""

import os
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.passes import Passes
from pseudoreal_trainer.plan.records import Agree

from tests.support.forked import start_rank
from tests.support.ports import free_port


def _fail_after_agreeing() -> None:
    """Let rank 0 fail in its first forward pass after it has enqueued its first `Agree`."""
    forward, agree, agreed = Passes.forward, ReductionThread.request_agreement, list[Agree]()

    def agrees(reductions: ReductionThread, step: Agree, *loss: Any, **asked: Any) -> Any:
        agreed.append(step)
        return agree(reductions, step, *loss, **asked)

    def fails(passes: Passes, *step: Any) -> None:
        if agreed and os.environ["RANK"] == "0":
            raise OSError("the disk has failed")
        forward(passes, *step)

    ReductionThread.request_agreement, Passes.forward = agrees, fails  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("clipping", ["None", "PerUnit", "Global"])
def test_a_failing_rank_does_not_wait_for_other_ranks(
    clipping: str, job_body: dict[str, Any], config: Any, tmp_path: Path
) -> None:
    """With clipping other than Global, the failing rank's reduction thread is waiting in the agreement collective.
    gloo's timeout is half an hour."""
    job_body["spec"]["optimizer"]["clipping"] = {"mode": clipping}
    job_body["spec"]["phases"][0] |= {
        "sharing": {"blocks": 2},
        "workers": 2,
        "parallelism": {"pipeline": 2},
        "batch": {"sequences": 6, "microBatches": 3},
    }
    file, port = tmp_path / "config.json", free_port()
    file.write_text(config(0).to_json())
    ranks = [start_rank(file, rank, 2, port, tmp_path / str(rank), _fail_after_agreeing) for rank in (0, 1)]
    try:
        assert ranks[0].wait() == 1
    finally:
        for rank in ranks:
            rank.kill()
    said = "".join(path.read_text() for path in (tmp_path / "0").glob("*.json"))
    assert "OSError: the disk has failed" in said
    assert "the disk has failed" in (tmp_path / "0" / "log").read_text()
