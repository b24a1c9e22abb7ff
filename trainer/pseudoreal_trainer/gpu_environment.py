"""Default environment variables of CUDA and torch for ranks with GPUs; the pod's environment overrides them."""

from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig


def gpu_environment(config: PhaseConfig) -> dict[str, str]:
    """Return the variables; empty for a pod without requested GPUs. Creates the folder of the flight recorder."""
    if not config.gpus:
        return {}
    folder = Path(config.work_directory) / "flight-recorder"
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / f"{config.phase}-execution-{config.execution}-rank-")
    found = {
        # Flight recorder: the last collectives of each rank, written when one times out; read with torch's fr_trace.
        # Each variable is set under its present name and its name before torch 2.9.
        **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        **dict.fromkeys(("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"), "1"),
        **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
    }
    if config.parallelism.pipeline > 1:
        # CUDA loads a kernel lazily at its first launch, and the load waits for all running kernels. One of them may be
        # receiving a message that depends on the kernel that this rank is about to launch: a deadlock.
        found["CUDA_MODULE_LOADING"] = "EAGER"
    return found
