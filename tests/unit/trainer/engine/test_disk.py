"""Offload on disks that lack direct I/O, have no room, fill up, or fail."""

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.engine.state.direct_file import DirectFile, DiskError, aligned_buffer
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.memory.pinned_arena import PAGE

from tests.support.checkpoints import assert_same, newest_of
from tests.support.small_volume import mounted

SMALL = 256 << 10
"""Size in bytes of a disk that is too small for the state."""
STEPS, SAVED = 7, 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system, in memory."""
    with mounted(tmp_path / "small", f"size={SMALL}") as folder:
        yield folder


def _has_direct_io(folder: Path) -> bool:
    path = folder / "probe"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _write_and_read(folder: Path) -> None:
    """Write and read pieces repeatedly, in an order other than their order in the file."""
    pieces, size = 4, 3 * PAGE
    file = DirectFile(folder, pieces * size)
    assert list(folder.iterdir()) == [], "nameless"
    random = torch.Generator().manual_seed(1)
    written = {}
    for piece in (2, 0, 3, 1, 2):
        buffer = aligned_buffer(size)
        buffer.copy_(torch.randint(0, 256, (size,), generator=random))
        file.write([(piece * size, buffer)])
        written[piece] = buffer
    for piece, expected in written.items():
        found = aligned_buffer(size)
        file.read([(piece * size, found)])
        assert torch.equal(found, expected)
    file.close()


def test_direct_file_uses_direct_io_where_the_disk_supports_it(tmp_path: Path) -> None:
    if not _has_direct_io(tmp_path):
        pytest.skip(f"the file system of {tmp_path} has no direct I/O")
    _write_and_read(tmp_path)


def test_direct_file_works_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            # As file systems do that have no direct I/O: the file is made, and then not opened.
            os.close(really_open(path, os.O_CREAT | os.O_WRONLY, mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    _write_and_read(tmp_path)


def test_direct_file_works_on_a_file_system_in_memory(small_disk: Path) -> None:
    _write_and_read(small_disk)


def test_a_file_that_does_not_fit_is_rejected_with_its_size(small_disk: Path) -> None:
    with pytest.raises(DiskError, match=rf"needs {2 * SMALL:,} bytes in {small_disk}, where {SMALL:,} are free"):
        DirectFile(small_disk, 2 * SMALL)
    assert list(small_disk.iterdir()) == []


def test_missing_disk_space_is_found_when_the_file_is_created(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of statvfs may be out of date when the file is made."""
    (small_disk / "others").write_bytes(bytes(SMALL // 2))
    monkeypatch.setattr(DirectFile, "_require_space", lambda *_: None)
    with pytest.raises(DiskError, match=rf"room for {SMALL:,} bytes cannot be made: No space left on device"):
        DirectFile(small_disk, SMALL)


def test_reading_a_truncated_file_fails(tmp_path: Path) -> None:
    file = DirectFile(tmp_path, 2 * PAGE)
    with pytest.raises(DiskError, match="shorter than it was made"):
        file.read([(PAGE, aligned_buffer(2 * PAGE))])
    file.close()


Job = Callable[[str], PhaseConfig]


@pytest.fixture
def job(job_body: dict[str, Any], config: Callable[..., PhaseConfig]) -> Job:
    """A phase with its state on disk, which saves once before its end."""
    job_body["spec"]["phases"] = job_body["spec"]["phases"][:1]
    job_body["spec"]["phases"][0] |= {"until": {"step": STEPS}, "offload": {"home": "Disk"}}
    job_body["spec"]["checkpoint"]["everySteps"] = SAVED
    return lambda work: config(0, work)


def test_a_disk_too_small_for_the_state_fails_the_phase_before_its_first_step(
    job: Job, train: Any, small_disk: Path
) -> None:
    config = job("work").model_copy(update={"offload_directory": str(small_disk / "offload")})
    with pytest.raises(TrainingError, match=r"needs [\d,]+ bytes in .*, where [\d,]+ are free; free some, give"):
        train(config)
    assert not (Path(config.work_directory) / "metrics.jsonl").exists()
    assert not CheckpointStore(Path(config.work_directory), config.job.uid).committed()


def _failing(call: Callable[..., int], number: int, at: int) -> Callable[..., int]:
    """Return the call, failing from the `at`-th time on."""
    calls = count(1)

    def fail(*arguments: Any) -> int:
        if next(calls) >= at:
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return fail


def _counting(call: Callable[..., int], calls: list[int]) -> Callable[..., int]:
    def counted(*arguments: Any) -> int:
        calls.append(1)
        return call(*arguments)

    return counted


@pytest.mark.parametrize(
    ("name", "number", "sentence"),
    [
        ("pwrite", errno.ENOSPC, "the state cannot be written: No space left on device"),
        ("pwrite", errno.EIO, "the state cannot be written: Input/output error"),
        ("preadv", errno.EIO, "the state cannot be read: Input/output error"),
    ],
)
def test_training_resumes_from_the_last_checkpoint_after_a_disk_failure(
    name: str, number: int, sentence: str, job: Job, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, name, _counting(getattr(os, name), calls))
        train(job("whole"))
    broken = job("broken")
    with monkeypatch.context() as patch:
        # The last step's: after the checkpoint, before the end.
        patch.setattr(os, name, _failing(getattr(os, name), number, at=round(len(calls) * (STEPS - 1) / STEPS)))
        with pytest.raises(TrainingError, match=rf"offload on disk, in .*: {sentence}; the last committed checkpoint"):
            train(broken)
    assert newest_of(broken).manifest.step == SAVED
    train(broken)
    whole, resumed = newest_of(job("whole")), newest_of(broken)
    assert resumed.manifest.step == STEPS
    assert_same(whole, resumed)


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, view, at: write(f, view[:PAGE], at))
    monkeypatch.setattr(os, "preadv", lambda f, views, at: read(f, [views[0][:PAGE]], at))
    _write_and_read(tmp_path)
