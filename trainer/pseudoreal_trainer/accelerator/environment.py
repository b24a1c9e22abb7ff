"""Environment variables of ranks on accelerators. Imports no torch: a pod's first process sets the variables."""

import os
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig

TAKE_FOUND = "PSEUDOREAL_TAKE_FOUND_ACCELERATORS"
"""1: ranks train on the machine's accelerators if there is one for each rank. `pseudoreal run` sets it. In a cluster a
pod that asks for no accelerator never takes one: what it sees may belong to other pods of the node."""

FIXED_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it, cuBLAS may add in another order when several streams use one handle (cuBLAS documentation, results
reproducibility)."""


def may_take_found() -> bool:
    return os.environ.get(TAKE_FOUND) == "1"


def accelerator_environment(config: PhaseConfig) -> dict[str, str]:
    """Return the environment variables for ranks on accelerators; empty for ranks that take none. Creates the folder of
    the flight recorder if the pod asks for accelerators."""
    if not config.gpus and not may_take_found():
        return {}
    # Hardware queues of a process on a GPU; CUDA has 8 by default and 32 at most. A rank has 7 streams and one for each
    # of up to 14 process groups. Streams that share a queue wait for each other: two ranks whose messages and sums
    # share queues in opposite order would wait for ever.
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if config.parallelism.pipeline > 1:
        # By default, CUDA loads a kernel at its first launch, and the load waits for all running kernels. A running
        # kernel may be receiving a message that depends on the kernel about to be launched: a deadlock.
        found["CUDA_MODULE_LOADING"] = "EAGER"
    if config.precision.kernels == "Deterministic":
        found |= FIXED_WORKSPACE
    return found | (_flight_recorder(config) if config.gpus else {})


def _flight_recorder(config: PhaseConfig) -> dict[str, str]:
    """Return the variables of the flight recorder: the last collectives of each rank, written when one times out; read
    with torch's fr_trace. Creates its folder."""
    folder = Path(config.work_directory) / "flight-recorder"
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / f"{config.phase}-execution-{config.execution}-rank-")
    return {
        # Each variable is set under its present name and its name before torch 2.9.
        **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        **dict.fromkeys(("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"), "1"),
        **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
    }
