"""Recognizes out-of-memory errors, states the known amounts, and names spec fields for reducing the need. Pure."""

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.errors import causes
from pseudoreal_trainer.quantity import readable_bytes
from pseudoreal_trainer.runtime.memory_use import MemoryUse, PodMemory

_GPU_ERROR = "OutOfMemoryError"
"""Name of torch's error type; a name, because torch may not be imported yet."""
_GPU_SAYS = re.compile(
    r"Tried to allocate (?P<asked>[\d.]+ \w+).*?total capacity of (?P<capacity>[\d.]+ \w+)"
    r".*?this process has (?P<used>[\d.]+ \w+) memory in use",
    re.DOTALL,
)
_CUDA_SAYS = ("CUDA error: out of memory", "Cuda failure 2 'out of memory'", "CUBLAS_STATUS_ALLOC_FAILED")
"""Out-of-memory phrases in errors of CUDA itself, NCCL and cuBLAS."""
_HOST_SAYS = re.compile(r"can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes")
_ARRAY_SAYS = re.compile(r"Unable to allocate (?P<asked>[\d.]+ \w+)")


@dataclass(frozen=True)
class Lack:
    on_gpu: bool
    text: str
    """Phrase on the requested amount, if known."""


def lack_of_memory(error: BaseException) -> Lack | None:
    """Return the lack of memory reported by an error or one of its causes; None for other errors."""
    return next((found for found in map(_lack, causes(error)) if found is not None), None)


def rank_sentence(lack: Lack, use: MemoryUse, config: PhaseConfig) -> str:
    """Return the sentence of a rank without enough memory."""
    facts = [lack.text] if lack.on_gpu else [lack.text, *_host_facts(use)]
    return f"out of memory: {', '.join(facts)}; {advice(config, on_gpu=lack.on_gpu)}"


def killed_sentence(ranks: Sequence[int], memory: PodMemory, config: PhaseConfig) -> str:
    """Return the sentence of a pod with a process ended by the OOM killer. `ranks` are the local ranks without an
    outcome."""
    limit = "the memory of its node" if memory.limit is None else f"its limit of {readable_bytes(memory.limit)}"
    peak = "" if memory.peak is None else f" (peak {readable_bytes(memory.peak)})"
    return (
        f"out of memory: the system ended local rank {', '.join(map(str, ranks))}, as the pod used more than"
        f" {limit}{peak}; {advice(config, on_gpu=False)}"
    )


def advice(config: PhaseConfig, *, on_gpu: bool) -> str:
    """Return advice on spec fields for reducing the need of memory."""
    return "to need less, " + ", or ".join(_changes(config, on_gpu))


def _lack(error: BaseException) -> Lack | None:
    text = str(error)
    if type(error).__name__ == _GPU_ERROR:
        return Lack(True, _gpu_facts(text))
    if said := [line for line in text.splitlines() if any(words in line for words in _CUDA_SAYS)]:
        return Lack(True, said[0])
    if found := _HOST_SAYS.search(text):
        return Lack(False, f"asked for {readable_bytes(int(found['bytes']))}")
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        found = _ARRAY_SAYS.search(text)
        return Lack(False, f"asked for {found['asked']}" if found else "the host has no more")
    return None


def _gpu_facts(text: str) -> str:
    found = _GPU_SAYS.search(text)
    if found is None:
        return text.partition("\n")[0]
    return f"asked for {found['asked']} on a GPU of {found['capacity']}, of which this rank used {found['used']}"


def _host_facts(use: MemoryUse) -> Iterator[str]:
    yield f"this rank used {readable_bytes(use.process)}"
    if use.bound is not None:
        yield f"and may have {readable_bytes(use.bound)} of data"
    if use.pod.limit is not None and use.pod.used is not None:
        yield f"its pod {readable_bytes(use.pod.used)} of {readable_bytes(use.pod.limit)}"


def _changes(config: PhaseConfig, on_gpu: bool) -> Iterator[str]:
    phase, offload = f"spec.phases[{config.phase}]", config.offload
    if not on_gpu:
        yield f"raise {phase}.resources.limits.memory"
    if config.batch.micro_batches < config.batch.sequences:
        yield f"raise {phase}.batch.microBatches (now {config.batch.micro_batches})"
    if config.activations.keep == "All":
        yield f"set {phase}.activations.keep: Inputs"
    elif on_gpu and config.activations.home == "Device":
        yield f"set {phase}.activations.home: Host"
    if offload.home != "Disk":
        yield f"set {phase}.offload.home: {'Host' if on_gpu and offload.home == 'Device' else 'Disk'}"
    if offload.window > 1 and (offload.homes or offload.budget or offload.home != "Device"):
        yield f"lower {phase}.offload.window (now {offload.window})"
    if not on_gpu:
        yield f"lower spec.checkpoint.bufferBytes (now {config.checkpoint.buffer_bytes})"
