"""What torch and CUDA are told in pods that asked for GPUs."""

from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer.accelerator.environment import TAKE_FOUND, accelerator_environment
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import torchrun_environment
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity


def test_a_pod_without_gpus_gets_no_gpu_variables(config: Any, tmp_path: Path) -> None:
    assert accelerator_environment(config(0)) == {}
    assert not (tmp_path / "work" / "flight-recorder").exists()


def test_the_flight_recorder_of_each_rank_writes_into_the_work_directory(config: Any) -> None:
    own = config(0, execution=3).model_copy(update={"gpus": 8})
    found = accelerator_environment(own)
    prefix = Path(found["TORCH_FR_DUMP_TEMP_FILE"])
    assert prefix.parent.is_dir()
    assert prefix.name == "pseudo-execution-3-rank-"
    assert found["TORCH_FR_DUMP_ON_TIMEOUT"] == "1"


@pytest.mark.parametrize(("pipeline", "loading"), [(1, None), (2, "EAGER")])
def test_ranks_of_a_pipeline_load_cuda_kernels_at_start(pipeline: int, loading: str | None, config: Any) -> None:
    own = config(0)
    parallelism = own.parallelism.model_copy(update={"pipeline": pipeline})
    own = own.model_copy(update={"gpus": 1, "parallelism": parallelism})
    assert accelerator_environment(own).get("CUDA_MODULE_LOADING") == loading


def test_each_stream_of_a_rank_has_a_hardware_queue(config: Any) -> None:
    """32 is the most that CUDA has."""
    own = config(0).model_copy(update={"gpus": 1})
    assert accelerator_environment(own)["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_deterministic_products_have_a_fixed_workspace(config: Any) -> None:
    own = config(0).model_copy(update={"gpus": 1})
    assert "CUBLAS_WORKSPACE_CONFIG" not in accelerator_environment(own)
    own = own.model_copy(update={"precision": own.precision.model_copy(update={"kernels": "Deterministic"})})
    assert accelerator_environment(own)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_local_run_has_the_variables_of_cuda_although_its_pod_asks_for_no_gpus(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a machine without GPUs, so the work directory gets no folder for what NCCL writes."""
    monkeypatch.setenv(TAKE_FOUND, "1")
    assert accelerator_environment(config(0)) == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert not (tmp_path / "work" / "flight-recorder").exists()
    monkeypatch.setenv(TAKE_FOUND, "0")
    assert accelerator_environment(config(0)) == {}


def test_variables_of_the_pod_override_the_defaults_for_gpus(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    found = torchrun_environment(
        config(0).model_copy(update={"gpus": 1}), PodFolder(tmp_path), RendezvousIdentity(0, 0, 0, 0)
    )
    assert (found["TORCH_FR_BUFFER_SIZE"], found["TORCH_NCCL_TRACE_BUFFER_SIZE"]) == ("7", "2000")
