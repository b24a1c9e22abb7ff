"""Reasons for the failure of a rank (out of memory, a lost peer, a crash of the process), as sentences for users.

The rank puts the sentence into its termination message. If the rank left no message, the pod puts the sentence into the
pod's message.
"""

import errno
import faulthandler
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.resolved.config import PhaseConfig

from pseudoreal_trainer.cgroups import MemoryUse, PodMemory
from pseudoreal_trainer.errors import PeerFailed, causes

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
class MemoryShortage:
    on_gpu: bool
    text: str
    """Phrase about the failed allocation, with the requested number of bytes if known."""


def lack_of_memory(error: BaseException) -> MemoryShortage | None:
    """Return the memory shortage reported by an error or one of its causes; None for other errors."""
    return next((found for found in map(_shortage_in, causes(error)) if found is not None), None)


def rank_sentence(lack: MemoryShortage, use: MemoryUse, config: PhaseConfig) -> str:
    """Return the sentence of a rank that ran out of memory."""
    facts = [lack.text] if lack.on_gpu else [lack.text, *_host_facts(use)]
    return f"out of memory: {', '.join(facts)}; {advice(config, on_gpu=lack.on_gpu)}"


def killed_sentence(ranks: Sequence[int], memory: PodMemory, config: PhaseConfig) -> str:
    """Return the sentence of a pod in which the OOM killer ended a process. `ranks`: local ranks without an outcome."""
    limit = "the memory of its node" if memory.limit is None else f"its limit of {readable_bytes(memory.limit)}"
    peak = "" if memory.peak is None else f" (peak {readable_bytes(memory.peak)})"
    return (
        f"out of memory: the system ended local rank {', '.join(map(str, ranks))}, as the pod used more than"
        f" {limit}{peak}; {advice(config, on_gpu=False)}"
    )


def advice(config: PhaseConfig, *, on_gpu: bool) -> str:
    """Return advice on which spec fields to change to reduce memory use."""
    return "to need less, " + ", or ".join(_changes(config, on_gpu))


def _shortage_in(error: BaseException) -> MemoryShortage | None:
    text = str(error)
    if type(error).__name__ == _GPU_ERROR:
        return MemoryShortage(True, _gpu_facts(text))
    if said := [line for line in text.splitlines() if any(words in line for words in _CUDA_SAYS)]:
        return MemoryShortage(True, said[0])
    if found := _HOST_SAYS.search(text):
        return MemoryShortage(False, f"asked for {readable_bytes(int(found['bytes']))}")
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        found = _ARRAY_SAYS.search(text)
        return MemoryShortage(False, f"asked for {found['asked']}" if found else "the host has no more")
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
    if config.activations.keep != "Inputs":
        yield f"set {phase}.activations.keep: Inputs"
    elif on_gpu and config.activations.home == "Device":
        yield f"set {phase}.activations.home: Host"
    if offload.home != "Disk":
        yield f"set {phase}.offload.home: {'Host' if on_gpu and offload.home == 'Device' else 'Disk'}"
    if offload.window > 1 and (offload.homes or offload.budget or offload.home != "Device"):
        yield f"lower {phase}.offload.window (now {offload.window})"
    if not on_gpu:
        yield f"lower spec.checkpoint.bufferBytes (now {config.checkpoint.buffer_bytes})"


_TYPES = ("DistNetworkError", "DistStoreError")
"""Names of torch's error types for failures of the rendezvous store; names, because torch may not be imported yet."""
_GLOO_SAYS = "gloo/transport/"
_NCCL_SAYS = (
    "ncclRemoteError",
    "remote process exited",
    "Connection closed by remote peer",
    "collective operation timeout",
    "NCCL operation timed out",
)
_TIMED_OUT = re.compile(r"tim(?:ed |e)out", re.IGNORECASE)
_MILLISECONDS = re.compile(r"(\d+) ?(?:ms\b|milliseconds)")


def has_lost_a_peer(error: BaseException) -> bool:
    return any(_is_of_a_peer(cause) for cause in causes(error))


def timeout_sentence(error: BaseException) -> str:
    """Return the start of a sentence about a collective that timed out because ranks were absent; empty for other
    errors."""
    for cause in causes(error):
        if _is_of_a_peer(cause) and _TIMED_OUT.search(text := str(cause)):
            limit = _MILLISECONDS.search(text)
            after = f" after {int(limit[1]) / 1000:g} s" if limit else ""
            return f"a collective timed out{after}, as some rank did not take part in it: "
    return ""


def _is_of_a_peer(error: BaseException) -> bool:
    text = str(error)
    known = isinstance(error, PeerFailed) or type(error).__name__ in _TYPES
    return known or any(words in text for words in (_GLOO_SAYS, *_NCCL_SAYS))


_HEAD = "Fatal Python error: "
_CRASHING = "Current thread "
_FRAME = "  File "


@dataclass(frozen=True)
class Crash:
    """Crash of a rank's process, as recorded by faulthandler."""

    what: str
    """Name of the fatal signal as faulthandler writes it: Aborted, Segmentation fault, Bus error, ..."""
    where: str | None
    """Innermost Python frame of the crashed thread; None if the thread runs no Python code."""

    @property
    def is_of_watchdog(self) -> bool:
        """Whether NCCL's watchdog ended the process. The watchdog, a thread of torch, aborts the process after a
        collective times out."""
        return self.what == "Aborted" and self.where is None


def enable_crash_files(folder: Path, local_rank: int) -> None:
    """Enable faulthandler for this process: a crash writes its traceback to a file that exists from now on."""
    # faulthandler keeps the file descriptor, so the file must stay open for the life of the process.
    faulthandler.enable(_crash_file(folder, local_rank).open("wb"))


def read_crashes(folder: Path, local_ranks: int) -> Mapping[int, Crash]:
    """Return local rank -> crash, for the ranks that have left a crash file."""
    found = {rank: _read_crash(_crash_file(folder, rank)) for rank in range(local_ranks)}
    return {rank: crash for rank, crash in found.items() if crash is not None}


def _crash_file(folder: Path, local_rank: int) -> Path:
    return folder / f"{local_rank}.crash"


def _read_crash(path: Path) -> Crash | None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    heads = [line.removeprefix(_HEAD) for line in lines if line.startswith(_HEAD)]
    if not heads:
        return None
    begin = next((index for index, line in enumerate(lines) if line.startswith(_CRASHING)), None)
    if begin is None:
        return Crash(heads[0], None)
    return Crash(heads[0], next((line.strip() for line in lines[begin:] if line.startswith(_FRAME)), "no frame"))
