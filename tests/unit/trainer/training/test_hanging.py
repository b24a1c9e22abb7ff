"""A failing rank reports its error and ends within two seconds, even if its other threads, files or sinks hang."""

import json
import os
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pseudoreal_trainer.checkpoint.tensor_file import TensorWriter
from pseudoreal_trainer.cli import pod, rank
from pseudoreal_trainer.data.sources import MixedStream
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.state.disk import DiskState
from pseudoreal_trainer.runtime.termination import TERMINATION_LOG, termination_message
from pseudoreal_trainer.training import metrics
from pseudoreal_trainer.training.sinks import SinkThread

from tests.support.forked import start_rank
from tests.support.patience import PATIENCE_SECONDS, wait_for
from tests.support.ports import free_port
from tests.support.processes import Forked
from tests.unit.trainer.data.support.written import write_native

SECONDS = 2.0
SAYS = "the main thread of this rank has failed"
STEP, MICRO_BATCHES = 4, 2
"""The failing step. At that time the checkpoint of step 2 is being written and later samples are being prefetched."""


def _hang(begun: threading.Event) -> None:
    begun.set()
    threading.Event().wait()


def _reader(begun: threading.Event) -> None:
    """Let the prefetch of a later step's samples hang."""
    read, calls = MixedStream.read, count(1)

    def hangs(stream: MixedStream, places: Any) -> Any:
        if next(calls) > STEP * MICRO_BATCHES:
            _hang(begun)
        return read(stream, places)

    MixedStream.read = hangs  # type: ignore[assignment, method-assign]


def _saver(begun: threading.Event) -> None:
    TensorWriter.append = lambda *_: _hang(begun)  # type: ignore[method-assign]


class _HangingSink:
    def log(self, *_: object) -> None: ...

    def close(self) -> None: ...


def _sink(begun: threading.Event) -> None:
    """Open a sink as some packages do: a non-daemon thread, which Python joins at exit, waits for a service."""

    def opened(*_: object) -> _HangingSink:
        threading.Thread(target=_hang, args=(begun,), daemon=False).start()
        return _HangingSink()

    vars(metrics)["open_sinks"] = lambda *_: [SinkThread("hanging", opened)]


def _volume_of_metrics(begun: threading.Event) -> None:
    """Let closing the metrics file hang: NFS sends written data when a file is closed."""
    begun.set()
    metrics.Reporter.__exit__ = lambda *_: _hang(begun)  # type: ignore[method-assign]


def _disk(begun: threading.Event) -> None:
    """Let a write of unit state in the previous step's update hang; the engine waits for the write before it frees the
    buffers."""
    update, writes = DiskState.update, os.pwrite

    def updates(*arguments: Any) -> None:
        if arguments[0].steps == STEP - 2:
            os.pwrite = hangs
        update(*arguments)

    def hangs(*arguments: Any) -> int:
        _hang(begun)
        return writes(*arguments)

    DiskState.update = updates  # type: ignore[assignment, method-assign]


def _log(begun: threading.Event) -> None:
    """Redirect stdout in the failing step to a full pipe without a reader."""
    _, written = os.pipe()
    os.set_blocking(written, False)
    try:
        while os.write(written, bytes(1 << 16)):
            pass
    except BlockingIOError:
        os.set_blocking(written, True)
    begun.set()
    train = Engine.train

    def fails(engine: Engine, batch: Any, training: Any, step: int, *rest: Any) -> Any:
        if step == STEP:
            os.dup2(written, 1)
        return train(engine, batch, training, step, *rest)

    Engine.train = fails  # type: ignore[method-assign, assignment]


HANGING = {f.__name__.strip("_"): f for f in (_reader, _saver, _sink, _volume_of_metrics, _disk, _log)}


def _prepare(name: str, folder: Path) -> None:
    """Let the named part hang, then let the main thread fail in step STEP."""
    begun, train = threading.Event(), Engine.train

    def fails(engine: Engine, batch: Any, training: Any, step: int, *rest: Any) -> Any:
        if step == STEP:
            assert begun.wait(PATIENCE_SECONDS)
            (folder / "failed").write_text(str(time.monotonic()))
            raise OSError(SAYS)
        return train(engine, batch, training, step, *rest)

    Engine.train = fails  # type: ignore[assignment, method-assign]
    HANGING[name](begun)


@pytest.fixture
def file(job_body: Any, config: Any, tmp_path: Path) -> Path:
    write_native(tmp_path / "tokens" / "web", [np.arange(1, 250), np.arange(1, 250)])
    job_body["spec"]["data"] = {
        "path": str(tmp_path / "tokens"),
        "sources": [{"name": "web"}],
        "validation": {"everySteps": 40, "sequences": 1, "sets": [{"name": "web"}]},
    }
    job_body["spec"]["checkpoint"] |= {"everySteps": 2, "mode": "Async"}
    job_body["spec"]["phases"][0] |= {"sharing": {"blocks": 4}, "parallelism": {"schedule": "Layered"}}
    path = tmp_path / "config.json"
    path.write_text(config(0).to_json())
    return path


@pytest.mark.solo
@pytest.mark.parametrize("name", [*HANGING])
def test_a_failing_rank_waits_for_nothing_that_hangs(name: str, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rank"
    if name == "disk":
        body = json.loads(file.read_text())
        body["offload"]["home"] = "Disk"
        file.write_text(json.dumps(body))
    process = start_rank(file, 0, 1, free_port(), folder, partial(_prepare, name, folder))
    code, ended = process.wait(PATIENCE_SECONDS), time.monotonic()
    assert code == 1, process.log.read_text()
    assert SAYS in json.loads((folder / "0.json").read_text())["message"]["message"]
    assert name == "log" or SAYS in process.log.read_text()
    assert ended - float((folder / "failed").read_text()) < SECONDS


def _succeed(config: Path, folder: Path) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ["PSEUDOREAL_OUTCOME_DIRECTORY"] = str(folder)
    begun = threading.Event()
    _sink(begun)
    sys.argv = ["rank", str(config)]
    rank.main()


def test_a_rank_that_is_done_ends_though_a_foreign_package_has_threads_that_do_not(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rank"
    folder.mkdir()
    assert Forked(_succeed, file, folder).wait(PATIENCE_SECONDS) == 0
    assert json.loads((folder / "0.json").read_text())["message"]["outcome"] == "Succeeded"


def test_a_pod_says_why_it_failed_though_its_volume_does_not_tell_the_newest_checkpoint(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()
    said = tmp_path / "termination"
    monkeypatch.setenv(TERMINATION_LOG, str(said))
    monkeypatch.setattr(pod, "_NEWEST_SECONDS", 0.1)

    def hangs(_: object) -> Any:
        asked.set()
        over.wait(PATIENCE_SECONDS)
        return SimpleNamespace(committed=lambda _: [])

    monkeypatch.setattr(pod, "store_of", hangs)
    message = termination_message("Failed", config(0), SAYS)
    try:
        assert pod._with_checkpoint_in_time(message, config(0)) == message
        assert asked.is_set()
        wait_for("the message", said.exists)
        assert SAYS in said.read_text()
    finally:
        over.set()
