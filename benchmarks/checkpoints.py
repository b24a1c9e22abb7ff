"""Time saving and loading beside `cp`, `cat`, torch.distributed.checkpoint and DeepSpeed.

`python -m benchmarks.checkpoints`

One rank trains the larger model. Every way of saving has a process of its own, so that memory can be compared.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from pseudoreal_api.resolved.config import CheckpointPolicy, JobIdentity
from pseudoreal_api.spec.checkpoint import CheckpointMode
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import Manifest, Random
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.saving import Saver
from pydantic import BaseModel
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from benchmarks import machine, pages
from benchmarks.cases import MODELS
from benchmarks.claims import Claim
from benchmarks.environment import ENVIRONMENT
from benchmarks.quiet import quiet_machine
from benchmarks.results import RESULTS, SCRATCH
from benchmarks.stacks import deepspeed_zero3
from benchmarks.stacks.ours import layout_of, make_engine, train_step
from benchmarks.work import Work, noisy_sequences

CHECKPOINTS = RESULTS / "checkpoints.json"
OURS_ASYNC, OURS_SYNC = "pseudoreal, Async", "pseudoreal, Sync"
"""The way of saving that is compared with `cp`."""
BUFFER_BYTES = 256 << 20
EVERY_STEPS = 20
_SAVES = 5
_UID = "benchmark"


class Saving(BaseModel, frozen=True):
    way: str
    """Name of the way in WAYS."""
    seconds: float
    """Median seconds until everything is on disk."""
    stall_seconds: float
    """Seconds of a save during which training stands still."""
    extra_bytes: int
    """Peak growth of the resident memory during the saves, in bytes."""
    load_seconds: float | None = None
    """Seconds to load the files; measured only if loading needs the process that wrote them."""


class Measured(BaseModel, frozen=True):
    bytes: int
    copy_seconds: float
    """Seconds for `cp` of the same files and `sync`."""
    read_seconds: float
    """Seconds for `cat` of the same files to /dev/null."""
    load_seconds: float
    """Seconds of our loader, including verification of the digests."""
    cold_read_seconds: float
    """`read_seconds` and `load_seconds` for files that are not in the page cache."""
    cold_load_seconds: float
    dcp_load_seconds: float
    step_seconds: float
    savings: list[Saving]


def main() -> None:
    CHECKPOINTS.parent.mkdir(exist_ok=True)
    SCRATCH.mkdir(exist_ok=True)
    with quiet_machine(), tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        savings = []
        for way in WAYS:
            with progress.step(f"saving: {way}"):
                savings.append(_in_a_process(way, Path(folder)))
        with progress.step("copying and loading"):
            measured = _beside_cp(Path(folder), savings)
    CHECKPOINTS.write_text(measured.model_dump_json(indent=1))
    machine.stamp(CHECKPOINTS)


def _in_a_process(way: str, folder: Path) -> Saving:
    result = folder / "result.json"
    command = [sys.executable, "-m", "benchmarks.checkpoints", way, str(folder), str(result)]
    subprocess.run(command, env=dict(os.environ) | ENVIRONMENT | {"OMP_NUM_THREADS": "2"}, check=True)
    return Saving.model_validate_json(result.read_bytes())


@dataclass(frozen=True)
class Bench:
    engine: Engine
    work: Work
    folder: Path

    def step(self) -> float:
        begin = time.perf_counter()
        train_step(self.engine, self.work, 0)
        self.engine.state.wait_for_updates()
        return time.perf_counter() - begin


def _work() -> Work:
    spec = MODELS["larger"].spec
    return Work(spec, 7, noisy_sequences(1, 4, spec.sequence_length + 1, 7), 1, recompute=False)


@contextmanager
def _bench(folder: Path) -> Iterator[Bench]:
    work = _work()
    engine = make_engine(work, Ranks(0, 1, torch.device("cpu")), layout_of(work, 1, "Host", 2), folder)
    yield Bench(engine, work, folder)
    engine.close()


def _ours(way: str, folder: Path, mode: CheckpointMode) -> Saving:
    with _bench(folder) as bench:
        bench.step()
        return _ours_of(way, bench, mode)


def _ours_of(way: str, bench: Bench, mode: CheckpointMode) -> Saving:
    policy = CheckpointPolicy(every_steps=1, mode="Async", buffer_bytes=BUFFER_BYTES, keep_last=1)
    store = CheckpointStore(bench.folder / "ours", _UID)
    costs = []
    with Saver(bench.engine, store, Fence(store.work_directory, 1), policy, None) as saver, _growth() as grown:
        for number in range(_SAVES):
            bench.step()
            saver.start(_manifest(bench, number))
            if mode == "Async":
                while not (saved := saver.poll()):
                    bench.step()
            else:
                saved = saver.finish()
            costs += [one.cost for one in saved]
    return Saving(
        way=way,
        seconds=median(cost.seconds for cost in costs),
        stall_seconds=median(cost.stall_seconds for cost in costs),
        extra_bytes=grown[0],
    )


def _manifest(bench: Bench, step: int) -> Manifest:
    return Manifest(
        job=JobIdentity(name="benchmark", namespace="default", uid=_UID),
        execution=1,
        phase="real",
        phase_index=0,
        model=bench.work.model,
        sharing=Sharing(blocks=bench.work.model.layers),
        random=Random(seed=0),
        corpus=CorpusIdentity(files=0, size=0, sha256=""),
        step=step,
        tokens=0,
        global_cursor=0,
        phase_complete=False,
        delinked=False,
    )


def _dcp(way: str, folder: Path, mode: CheckpointMode) -> Saving:
    with _bench(folder) as bench:
        bench.step()
        return _dcp_of(way, bench, mode)


def _dcp_of(way: str, bench: Bench, mode: CheckpointMode) -> Saving:
    # The tensors that the engine updates, as a trainer would pass them.
    state = {
        f"{unit}.{kind}": one.part(kind, 0, one.shard.length)
        for unit, one in bench.engine.state._store.states.items()
        for kind in KINDS
    }
    seconds, stalls = [], []
    with _growth() as grown:
        for _ in range(_SAVES):
            bench.step()
            shutil.rmtree(bench.folder / "dcp", ignore_errors=True)
            writer, begin = FileSystemWriter(bench.folder / "dcp"), time.perf_counter()
            if mode == "Async":
                future: Any = async_save(state, storage_writer=writer, no_dist=True)
                stalls.append(time.perf_counter() - begin)
                while not future.done():
                    bench.step()
            else:
                save(state, storage_writer=writer, no_dist=True)
                stalls.append(time.perf_counter() - begin)
            seconds.append(time.perf_counter() - begin)
    return Saving(way=way, seconds=median(seconds), stall_seconds=median(stalls), extra_bytes=grown[0])


def _deepspeed(way: str, folder: Path) -> Saving:
    """Measure DeepSpeed, which saves while training stands still and leaves flushing to the operating system."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # as torchrun would
    dist.init_process_group("gloo", init_method=f"file://{folder.resolve()}/group", rank=0, world_size=1)
    work, target = _work(), folder / "deepspeed"
    engine = deepspeed_zero3.make_engine(work, 1, deepspeed_zero3.OFFLOAD)
    seconds, stalls = [], []
    deepspeed_zero3.train_step(engine, work, [work.batches[0]])
    with _growth() as grown:
        for _ in range(_SAVES):
            deepspeed_zero3.train_step(engine, work, [work.batches[0]])
            shutil.rmtree(target, ignore_errors=True)
            begin = time.perf_counter()
            engine.save_checkpoint(str(target), tag="step")
            stalls.append(time.perf_counter() - begin)
            subprocess.run(["sync", *map(str, target.glob("*/*"))], check=True)
            seconds.append(time.perf_counter() - begin)
    load = median(_seconds(lambda: engine.load_checkpoint(str(target), tag="step")) for _ in range(_SAVES))
    dist.destroy_process_group()
    return Saving(
        way=way,
        seconds=median(seconds),
        stall_seconds=median(stalls),
        extra_bytes=grown[0],
        load_seconds=load,
    )


WAYS: dict[str, Callable[[str, Path], Saving]] = {
    OURS_ASYNC: partial(_ours, mode="Async"),
    OURS_SYNC: partial(_ours, mode="Sync"),
    "torch.distributed.checkpoint, Async": partial(_dcp, mode="Async"),
    "torch.distributed.checkpoint, Sync": partial(_dcp, mode="Sync"),
    "DeepSpeed ZeRO-3 + offload": _deepspeed,
}
"""Name in the report -> way of saving."""


@contextmanager
def _growth() -> Iterator[list[int]]:
    """Yield a list whose entry is the peak growth of the process's resident memory, in bytes."""
    found, ended, first = [0], threading.Event(), _resident()

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], _resident() - first)

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    ended.set()
    thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _beside_cp(folder: Path, savings: list[Saving]) -> Measured:
    store = CheckpointStore(folder / "ours", _UID)
    manifest = store.whole(store.committed()[-1])
    files, twin = Path(str(store.folder)) / manifest.name, folder / "copy"
    copies, reads, loads, theirs = [], [], [], []
    cold_reads, cold_loads = [], []
    for _ in range(_SAVES):
        shutil.rmtree(twin, ignore_errors=True)
        copies.append(
            _seconds(lambda: subprocess.run(f"cp -r {files} {twin} && sync {twin}/*", shell=True, check=True))
        )
        reads.append(_seconds(lambda: subprocess.run(f"cat {files}/* > /dev/null", shell=True, check=True)))
        loads.append(_seconds(lambda: _load(store, manifest)))
        theirs.append(_seconds(lambda: _load_dcp(folder / "dcp")))
        _forget(files)
        cold_reads.append(_seconds(lambda: subprocess.run(f"cat {files}/* > /dev/null", shell=True, check=True)))
        _forget(files)
        cold_loads.append(_seconds(lambda: _load(store, manifest)))
    with _bench(folder) as bench:
        bench.step()
        steps = [bench.step() for _ in range(_SAVES)]
    return Measured(
        bytes=manifest.bytes,
        copy_seconds=median(copies),
        read_seconds=median(reads),
        load_seconds=median(loads),
        cold_read_seconds=median(cold_reads),
        cold_load_seconds=median(cold_loads),
        dcp_load_seconds=median(theirs),
        step_seconds=median(steps),
        savings=savings,
    )


def _forget(files: Path) -> None:
    """Drop the files from the page cache."""
    for path in files.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _load(store: CheckpointStore, manifest: Manifest) -> None:
    store.verify(manifest)
    reader = store.reader(manifest)
    for kind in KINDS:
        for name in reader.names:
            reader.tensor(name, kind)


def _load_dcp(folder: Path) -> None:
    reader = FileSystemReader(folder)
    described: Any = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(tensor.size, dtype=torch.float32) for name, tensor in described.items()}
    load(state, storage_reader=reader, no_dist=True)


def read() -> Measured:
    return Measured.model_validate_json(CHECKPOINTS.read_bytes())


def claim(found: Measured, stamp: machine.Stamp) -> Claim:
    ours = [one for one in found.savings if one.way in (OURS_ASYNC, OURS_SYNC)]
    others = [one for one in found.savings if one not in ours]
    still = next(one for one in ours if one.way == OURS_ASYNC).stall_seconds
    slower = next(one for one in ours if one.way == OURS_SYNC).seconds
    return Claim(
        subject="Saving a checkpoint",
        page=pages.CHECKPOINTS.name,
        against=", ".join(one.way for one in others),
        result=(
            f"an asynchronous save of pseudoreal stops training for {1000 * still:.0f} ms; saves of the other programs"
            f" stop training for {1000 * min(one.stall_seconds for one in others):.0f} ms or more",
        ),
        loses=tuple(
            f"a synchronous save of pseudoreal takes {slower / one.seconds:.1f} times as long as a save with"
            f" *{one.way}*"
            for one in others
            if one.seconds < slower
        ),
        measured=f"{stamp.date}, at commit {stamp.commit}, on {machine.hardware()}",
        release=stamp.release,
    )


def section() -> str:
    """Return the section as Markdown, from the newest results."""
    found = read()
    rows = "\n".join(
        f"| {one.way} | {one.seconds:.2f} | {one.stall_seconds:.3f} |"
        f" {one.stall_seconds / (EVERY_STEPS * found.step_seconds):.2%} | {one.extra_bytes / 2**20:.0f} |"
        for one in found.savings
    )
    sync = next(one for one in found.savings if one.way == OURS_SYNC)
    save_rate, load_rate = found.copy_seconds / sync.seconds, found.read_seconds / found.load_seconds
    cold_rate = found.cold_read_seconds / found.cold_load_seconds
    share = f"… as a share of the time of {EVERY_STEPS} steps"
    own_loads = "".join(
        f" {one.way} loads its own files from the page cache in {one.load_seconds:.2f} s."
        for one in found.savings
        if one.load_seconds is not None
    )
    return f"""## Saving and loading

One rank trains the [larger model](steps.md#larger-model). The state of this model has {found.bytes / 2**20:.0f} MiB and
is on the host. A step of training takes {found.step_seconds:.2f} s. pseudoreal saves the state through a buffer of
{BUFFER_BYTES >> 20} MiB. During an asynchronous save (*Async*), training continues; during a synchronous save (*Sync*),
training waits. Times are medians of {_SAVES} saves. *Extra memory* is the largest growth of the resident memory of the
process during the saves.

| save | until on disk, s | training stands still, s | {share} | extra memory, MiB |
| --- | ---: | ---: | ---: | ---: |
{rows}

When pseudoreal saves, it computes a digest of each file. When pseudoreal loads a file, it computes the digest again and
compares this digest with the saved digest. For comparison, the benchmark copied the saved files by `cp` and `sync`, and
read them by `cat` to `/dev/null`:

- A synchronous save of pseudoreal takes {sync.seconds:.2f} s. `cp` and `sync` take {found.copy_seconds:.2f} s to copy
  the same files, so the save has {save_rate:.0%} of the throughput of `cp` and `sync`.
- If the files are in the page cache, pseudoreal loads them in {found.load_seconds:.2f} s. From the page cache, `cat`
  reads the same files in {found.read_seconds:.2f} s, so the load by pseudoreal has {load_rate:.0%} of the throughput of
  `cat`.
- If the files are not in the page cache, pseudoreal loads them in {found.cold_load_seconds:.2f} s. From the disk, `cat`
  reads the same files in {found.cold_read_seconds:.2f} s, so the load by pseudoreal has {cold_rate:.0%} of the
  throughput of `cat`.
- From the page cache, torch.distributed.checkpoint loads its own files in {found.dcp_load_seconds:.2f} s, without
  comparing digests.{own_loads}"""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(2)
        name, files, result = sys.argv[1:]
        Path(result).write_text(WAYS[name](name, Path(files)).model_dump_json())
    else:
        main()
