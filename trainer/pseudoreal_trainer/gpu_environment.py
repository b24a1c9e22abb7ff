"""Variables of CUDA and torch for ranks that have GPUs: defaults, which the environment of the pod overrides."""

from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig


def gpu_environment(config: PhaseConfig) -> dict[str, str]:
    """The variables, empty for a pod that asked for no GPU. Makes the folder of the flight recorder."""
    if not config.gpus:
        return {}
    folder = Path(config.work_directory) / "flight-recorder"
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / f"{config.phase}-execution-{config.execution}-rank-")
    found = {
        # The last collectives of each rank, written when one takes too long; torch's fr_trace reads them.
        # Each variable by its present name and by that of torch before 2.9.
        **dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        **dict.fromkeys(("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"), "1"),
        **dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
    }
    if config.parallelism.pipeline > 1:
        # A kernel that is loaded at its first launch waits for all that run, among them one that receives a message;
        # and that message may depend on what this rank is about to launch.
        found["CUDA_MODULE_LOADING"] = "EAGER"
    return found
