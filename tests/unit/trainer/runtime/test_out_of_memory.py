"""Out-of-memory reports name the memory that there was and the fields to change, also if the kernel killed the rank."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_trainer.cgroups import MemoryUse, PodMemory, exhausted, memory_use, pod_memory
from pseudoreal_trainer.runtime.failures import MemoryShortage, advice, killed_sentence, lack_of_memory, rank_sentence
from pseudoreal_trainer.training.saving import SavingFailed

from tests.support.patience import wait_for
from tests.support.pods import start_pod

GIB, MIB = 1 << 30, 1 << 20
# Message of torch 2.11, because these tests have no GPU.
GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.06 GiB is free."
    " Including non-PyTorch memory, this process has 78.11 GiB memory in use. Of the allocated memory 77.05 GiB is"
    " allocated by PyTorch, and 411.21 MiB is reserved by PyTorch but unallocated."
)


def _raised(act: Any) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        act()
    return raised.value


def test_gpu_errors_are_recognized_as_out_of_memory() -> None:
    found = lack_of_memory(torch.OutOfMemoryError(GPU))
    assert found == MemoryShortage(True, "asked for 2.50 GiB on a GPU of 79.18 GiB, of which this rank used 78.11 GiB")
    assert lack_of_memory(torch.OutOfMemoryError("no room\nat all")) == MemoryShortage(True, "no room")
    for said in ("CUDA error: out of memory", "Cuda failure 2 'out of memory'", "CUBLAS_STATUS_ALLOC_FAILED here"):
        assert lack_of_memory(RuntimeError(f"it failed\n{said}\nmore")) == MemoryShortage(True, said)


def test_host_errors_as_they_are_really_raised_are_recognized_as_out_of_memory() -> None:
    too_much = 1 << 50
    of_torch = lack_of_memory(_raised(lambda: torch.empty(too_much)))
    assert of_torch == MemoryShortage(False, "asked for 4.00 PiB")
    of_numpy = lack_of_memory(_raised(lambda: np.empty(too_much, np.uint8)))
    assert of_numpy == MemoryShortage(False, "asked for 1.00 PiB")
    assert lack_of_memory(_raised(lambda: bytearray(too_much))) == MemoryShortage(False, "the host has no more")
    assert lack_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) is not None


def test_an_error_caused_by_a_lack_of_memory_is_one() -> None:
    error = SavingFailed("checkpoint pseudo-00000001 could not be written")
    error.__cause__ = MemoryError()
    assert lack_of_memory(error) == MemoryShortage(False, "the host has no more")


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "full"), ValueError("memory")])
def test_other_errors_are_no_lack_of_memory(error: Exception) -> None:
    assert lack_of_memory(error) is None


def test_the_sentence_of_a_rank_names_its_use_of_memory_and_advice(config: Any) -> None:
    lack = MemoryShortage(False, "asked for 32.00 MiB")
    assert rank_sentence(lack, MemoryUse(3 * GIB, None, PodMemory()), config(0)) == (
        "out of memory: asked for 32.00 MiB, this rank used 3.00 GiB; to need less, raise"
        " spec.phases[pseudo].resources.limits.memory, or raise spec.phases[pseudo].batch.microBatches (now 2), or set"
        " spec.phases[pseudo].offload.home: Disk, or lower spec.checkpoint.bufferBytes (now 256Mi)"
    )
    pod = PodMemory(limit=8 * GIB, used=8 * GIB - MIB)
    assert (
        "this rank used 3.00 GiB, and may have 4.00 GiB of data, its pod 8.00 GiB of 8.00 GiB; to need"
        in rank_sentence(lack, MemoryUse(3 * GIB, 4 * GIB, pod), config(0))
    )


def test_the_sentence_of_an_oom_killed_rank_names_the_limit_and_advice(config: Any) -> None:
    said = killed_sentence([1], PodMemory(limit=4 * GIB, peak=4 * GIB, kills=1), config(0))
    assert "ended local rank 1, as the pod used more than its limit of 4.00 GiB (peak 4.00 GiB); to need less" in said
    assert "more than the memory of its node; " in killed_sentence([0, 1], PodMemory(kills=1), config(0))


def _advised(job_body: Any, config: Any, on_gpu: bool, **phase: Any) -> list[str]:
    job_body["spec"]["phases"][0] |= phase
    return advice(config(0), on_gpu=on_gpu).removeprefix("to need less, ").split(", or ")


def test_advice_names_only_fields_that_can_still_reduce_the_need(job_body: Any, config: Any) -> None:
    phase = "spec.phases[pseudo]"
    assert _advised(job_body, config, True) == [
        f"raise {phase}.batch.microBatches (now 2)",
        f"set {phase}.activations.home: Host",
        f"set {phase}.offload.home: Host",
    ]
    for keep in ("All", "Products"):
        advised = _advised(job_body, config, True, activations={"keep": keep})
        assert advised[1] == f"set {phase}.activations.keep: Inputs"
    all_done = {
        "batch": {"sequences": 6, "microBatches": 6},
        "activations": {"home": "Host"},
        "offload": {"home": "Disk", "window": 3},
    }
    assert _advised(job_body, config, True, **all_done) == [f"lower {phase}.offload.window (now 3)"]
    assert _advised(job_body, config, False, **all_done) == [
        f"raise {phase}.resources.limits.memory",
        f"lower {phase}.offload.window (now 3)",
        "lower spec.checkpoint.bufferBytes (now 256Mi)",
    ]


def _files(folder: Path, **content: str) -> None:
    folder.mkdir(parents=True)
    for name, text in content.items():
        (folder / f"memory.{name}").write_text(text + "\n")


V1 = {
    "limit_in_bytes": str(2 * GIB),
    "usage_in_bytes": str(GIB),
    "max_usage_in_bytes": str(2 * GIB),
    "oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
}
V2 = {"max": str(2 * GIB), "current": str(GIB), "peak": str(2 * GIB), "events": "low 0\nmax 9\noom 4\noom_kill 3"}
KNOWN = PodMemory(limit=2 * GIB, used=GIB, peak=2 * GIB, kills=3)


@pytest.mark.parametrize(
    ("place", "files", "own", "expected"),
    [
        ("memory/kube/pod", V1, "4:cpu:/\n5:memory:/kube/pod\n0::/", KNOWN),
        ("memory", V1, "5:hugetlb,memory:/kube/pod/of/the/host", KNOWN),
        ("kube/pod", V2, "0::/kube/pod", KNOWN),
        (".", V2, "0::/../other", KNOWN),
        (".", V2 | {"max": "max"}, "0::/", PodMemory(None, GIB, 2 * GIB, 3)),
        ("memory", V1 | {"limit_in_bytes": "9223372036854771712"}, "5:memory:/", PodMemory(None, GIB, 2 * GIB, 3)),
        (".", {"current": str(GIB)}, "0::/", PodMemory(used=GIB)),
        (".", {}, "0::/", PodMemory()),
    ],
)
def test_the_memory_of_a_pod_is_read_from_both_versions_of_cgroups(
    place: str, files: Any, own: str, expected: PodMemory, tmp_path: Path
) -> None:
    _files(tmp_path / "groups" / place, **files)
    (tmp_path / "own").write_text(own)
    assert pod_memory(tmp_path / "groups", tmp_path / "own") == expected


def test_only_oom_kills_between_two_samples_count() -> None:
    assert exhausted(KNOWN, KNOWN) is None
    after = replace(KNOWN, kills=4)
    assert exhausted(KNOWN, after) == after


def test_unreadable_cgroup_files_give_unknown_amounts(tmp_path: Path) -> None:
    assert pod_memory(tmp_path, tmp_path / "none") == PodMemory()
    assert memory_use().process > 50 * MIB


class Group:
    """A cgroup v1 memory group with a limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def limit(self, size: int) -> None:
        (self.folder / "memory.limit_in_bytes").write_text(str(size))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text("0")


@pytest.fixture
def group() -> Iterator[Group]:
    of_memory = [line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().split() if ":memory:" in line]
    if not of_memory:
        pytest.skip("there are no control groups of version 1 for memory")
    folder = Path(f"/sys/fs/cgroup/memory{of_memory[0]}/pseudoreal-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make control groups: {error}")
    yield Group(folder)
    # The process from which torchrun was forked ends shortly after the pod's process.
    wait_for("the end of all processes", lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


_POD = """
import sys
from pseudoreal_trainer.cli import pod as program
program.WORKER = "tests.unit.trainer.runtime.support.hungry"
program.main()
"""


def test_the_outcome_of_an_oom_killed_rank_is_out_of_memory(config: Any, tmp_path: Path, group: Group) -> None:
    group.limit(1536 * MIB)
    ended = start_pod(config(0), tmp_path / "pod", program=("-c", _POD), before=group.enter)
    assert ended.wait() == 71, ended.said()
    message = ended.message()
    assert message["outcome"] == "OutOfMemory"
    assert "ended local rank 0, as the pod used more than its limit of 1.50 GiB (peak 1.50 GiB)" in message["message"]
    assert "raise spec.phases[pseudo].resources.limits.memory" in message["message"]
