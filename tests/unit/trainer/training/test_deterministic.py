from typing import Any

import pytest
from pseudoreal_trainer.training import start


@pytest.mark.parametrize("kernels", ["Fastest", "Deterministic"])
def test_a_job_chooses_deterministic_kernels(
    kernels: str, job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(start, "use_deterministic_kernels", lambda: calls.append(None))
    job_body["spec"].setdefault("precision", {})["kernels"] = kernels
    train(config(0))
    assert len(calls) == (kernels == "Deterministic")
