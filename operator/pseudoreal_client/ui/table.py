"""Rows of all jobs of a namespace, or of all namespaces, kept by a list and a watch.

Only the rows stay in memory, not the jobs: whoever writes a job decides its size.
"""

import random
import threading
import time
from collections.abc import Callable

import structlog
from pseudoreal.api import Api
from pseudoreal.errors import ClientError
from pseudoreal.observed_job import ObservedJob, one_line, share
from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_trainer.ui.view import Listing, Row

from pseudoreal_client.text import number

MOST_JOBS = 5000
"""Most jobs of the list."""
_LOOK_SECONDS = 0.25
"""Seconds between two looks at the table."""
_GONE = 410
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 30.0

log = structlog.get_logger()


class JobTable:
    """Rows, kept by a thread of its own. `tell` is called there with the id of each job that changes."""

    def __init__(self, api: Api, namespace: str | None, tell: Callable[[str], None]) -> None:
        self._api, self._namespace, self._tell = api, namespace, tell
        self._rows: dict[str, Row] = {}
        self._notice, self._left_out = "", False
        self._position = ""
        """Version of the last change; empty: list again."""
        self._lock = threading.Lock()
        self.version = 0
        """Number of changes so far; 0: the first list has neither come nor failed."""
        threading.Thread(target=self._run, name="jobs", daemon=True).start()

    def listing(self) -> Listing:
        with self._lock:
            rows = sorted(self._rows.values(), key=lambda row: (row.since, row.id), reverse=True)
            cut = [f"Only {MOST_JOBS:,} jobs are listed; choose a namespace with -n."] if self._left_out else []
            return Listing(rows, [*([self._notice] if self._notice else []), *cut])

    def __contains__(self, id: str) -> bool:
        return id in self._rows

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                if not self._position:
                    self._list()
                self._watch()
                failures = 0
            except ClientError as error:
                failures += 1
                if error.status == _GONE:
                    self._position = ""  # changes were missed: list again
                else:
                    self._position = self._position if error.may_pass else ""
                    self._say(f"The list may be old: {error.message}" if self._rows else error.message)
            except Exception as error:
                # An answer that no API server gives. The thread must not end: the list would stand still.
                log.error("jobs_not_read", exc_info=error)
                failures, self._position = failures + 1, ""
                self._say(f"The list may be old: an answer of the cluster makes no sense ({type(error).__name__}).")
            time.sleep(_pause(failures))

    def _list(self) -> None:
        """Replace all rows."""
        rows: dict[str, Row] = {}
        version, left_out = "", False
        for page in self._api.pages(KIND, self._namespace):
            version = version or page["metadata"]["resourceVersion"]
            for body in page["items"]:
                left_out = len(rows) >= MOST_JOBS
                if left_out:
                    break
                row = _row({"apiVersion": API_VERSION, "kind": KIND, **body})
                rows[row.id] = row
            if left_out:
                break
        with self._lock:
            gone = self._rows.keys() - rows.keys()
            changed = {id for id, row in rows.items() if self._rows.get(id) != row}
            self._rows, self._left_out = rows, left_out
        self._note_change()
        self._position = version
        for id in (*gone, *changed):
            self._tell(id)

    def _watch(self) -> None:
        """Apply changes until the API server ends the watch."""
        lines = self._api.watch_jobs(self._namespace, self._position)
        self._say("")
        for line in lines:
            kind, body = self._api.event_of(line, self._namespace, "")
            self._position = body["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                continue
            row = _row(body)
            with self._lock:
                if kind == "DELETED":
                    self._rows.pop(row.id, None)
                elif row.id in self._rows or len(self._rows) < MOST_JOBS:
                    self._rows[row.id] = row
                else:
                    self._left_out = True
            self._note_change()
            self._tell(row.id)

    def _say(self, notice: str) -> None:
        if notice != self._notice or not self.version:
            self._notice = notice
            self._note_change()

    def _note_change(self) -> None:
        with self._lock:
            self.version += 1


def id_of(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def _row(body: dict[str, object]) -> Row:
    job = ObservedJob(body)
    id = id_of(job.namespace, job.name)
    since = job.created.replace("T", " ").removesuffix("Z")
    if "spec" not in body:
        return Row(id, job.name, job.namespace, "Unreadable", since=since, note="The job is too large to be listed.")
    if (reason := job.unreadable) is not None:
        return Row(id, job.name, job.namespace, "Unreadable", since=since, note=reason)
    status, progress = job.status, job.status.progress
    is_calm = status.state in ("Training", "Complete")
    return Row(
        id,
        job.name,
        job.namespace,
        status.state,
        phase=status.current_phase or "",
        progress=share(progress) if progress else "",
        loss=(progress.loss or "") if progress else "",
        restarts=number(status.restarts),
        since=since,
        note=one_line(job.reason.message) if job.reason and not is_calm else "",
    )


def _pause(failures: int) -> float:
    most = min(_LEAST_PAUSE_SECONDS * 2.0**failures, _MOST_PAUSE_SECONDS)
    return random.uniform(most / 2, most)


class TableFeed:
    """Feed of the list."""

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self._seen = 0
        self._closed = threading.Event()

    def read(self) -> Listing | None:
        version = self._table.version
        if version == self._seen:
            return None
        self._seen = version
        return self._table.listing()

    def wait(self) -> None:
        self._closed.wait(_LOOK_SECONDS)

    def close(self) -> None:
        self._closed.set()
