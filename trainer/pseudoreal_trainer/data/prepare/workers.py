"""Worker processes that prepare groups, one group at a time.

Workers are spawned, because the tokenizers library must not be forked once it has threads. Each worker encodes on one
thread. Workers end with their parent process, even if the parent is killed.
"""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.prepare.encoding import Document
from pseudoreal_trainer.data.prepare.group import GroupRecord, Work, prepare_group
from pseudoreal_trainer.data.tokenizer.tokenizer import load_tokenizer
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.logs import configure_logs

_CONTEXT = multiprocessing.get_context("spawn")
_TICK_SECONDS = 0.5

_READ, _TEXT, _TOKENS, _DOCUMENTS, _MALFORMED, _COUNTS = range(6)

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Totals:
    """Progress of all groups. Shards of an earlier run count only as bytes read."""

    read_bytes: int
    """Bytes of the inputs read so far."""
    text_bytes: int
    tokens: int
    documents: int
    malformed: int


class _GroupProgress:
    """Progress counters of one group, in shared memory. Only the process that prepares the group writes them."""

    def __init__(self, counts: Counts, size: int) -> None:
        self._counts, self._size = counts, size

    def wrote(self, document: Document) -> None:
        self._counts[_TEXT] += document.text_bytes
        self._counts[_TOKENS] += len(document.tokens) + 1
        self._counts[_DOCUMENTS] += 1

    def read(self, position: int, malformed: int) -> None:
        self._counts[_READ], self._counts[_MALFORMED] = position, malformed

    def skip(self) -> None:
        self._counts[_READ] = self._size


@dataclass(frozen=True)
class TokenizerPath:
    path: str
    end_of_document: int


def prepare_groups(
    works: Sequence[Work], tokenizer: TokenizerPath, workers: int, tick: Callable[[Totals], None]
) -> list[GroupRecord]:
    """Return the record of each group. `tick` is called with the totals at least every `_TICK_SECONDS`. Raises
    InvalidJobError for the first input that cannot be used, and TrainingError if a process fails."""
    shared = _CONTEXT.RawArray("q", _COUNTS * len(works))
    counts = _counts(shared)
    waiting, found = deque(range(len(works))), dict[int, GroupRecord]()
    with _started(min(workers, len(works)), shared, tokenizer) as idle:
        busy: dict[Connection, _Worker] = {}
        while len(found) < len(works):
            while idle and waiting:
                worker = idle.pop()
                worker.begin(waiting.popleft(), works)
                busy[worker.connection] = worker
            for ready in connection.wait([*busy], timeout=_TICK_SECONDS):
                assert isinstance(ready, Connection), "only connections are waited for"
                worker = busy.pop(ready)
                found[worker.index] = worker.result()
                idle.append(worker)
            tick(Totals(*counts.sum(0).tolist()))
    return [found[index] for index in range(len(works))]


class _Worker:
    """The parent's handle of a worker process."""

    def __init__(self, shared: Any, tokenizer: TokenizerPath) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_work, args=(theirs, shared, tokenizer), daemon=True)
        self.process.start()
        theirs.close()  # so that the connection closes when the process ends
        self.index = -1
        """Index in `works` of the group that the worker prepares; -1 before its first group."""

    def begin(self, index: int, works: Sequence[Work]) -> None:
        self.index = index
        self.connection.send((index, works[index]))

    def result(self) -> GroupRecord:
        try:
            found = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise TrainingError(
                f"a process that prepares text has ended with the exit code {self.process.exitcode} (-9: the system has"
                " killed it, mostly as memory was short; give fewer --workers or less --shard-bytes)"
            ) from None
        if isinstance(found, GroupRecord):
            return found
        assert isinstance(found, Exception), "a worker sends a record or an error"
        raise found


@contextmanager
def _started(count: int, shared: Any, tokenizer: TokenizerPath) -> Iterator[list[_Worker]]:
    """Yield `count` idle processes, and terminate all of them at the end."""
    workers = [_Worker(shared, tokenizer) for _ in range(count)]
    try:
        yield [*workers]
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _work(asked: Connection, shared: Any, tokenizer: TokenizerPath) -> None:
    """Prepare one group after another until the process is terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent terminates the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    configure_logs(sys.stderr)
    os.environ["RAYON_NUM_THREADS"] = "1"  # before the tokenizers library creates its thread pool
    loaded, counts = load_tokenizer(tokenizer.path, tokenizer.end_of_document), _counts(shared)
    while True:
        try:
            index, work = asked.recv()
        except EOFError:
            return
        try:
            asked.send(prepare_group(work, loaded, _GroupProgress(counts[index], work.group.size)))
        except (InvalidJobError, TrainingError) as error:
            asked.send(type(error)(str(error)))
        except Exception as error:
            asked.send(TrainingError(f"group {work.group.number} was not prepared: {_said(error)}"))


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error}; make room, and start the command again: it goes on after the last finished shard"
    return str(error) if isinstance(error, OSError) else traceback.format_exc()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only worker processes run this"
    parent.join()
    os._exit(1)  # sys.exit would end only this thread


def _counts(shared: Any) -> Counts:
    """Return the counters of all groups, [groups, 5]."""
    counts: Counts = np.frombuffer(shared, dtype=np.int64).reshape(-1, _COUNTS)
    return counts
