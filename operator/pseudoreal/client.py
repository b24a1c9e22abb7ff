"""Client of the jobs on a cluster, one call at a time. The commands of `pseudoreal` for clusters call it.

Every request has a limit on its seconds and on the bytes of its answer (`api`). Every failure is a ClientError.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pseudoreal_api.base import API_VERSION, KIND
from pseudoreal_api.spec.check import InvalidJob
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal import changes
from pseudoreal.api import Api
from pseudoreal.changes import Change
from pseudoreal.connect import connect
from pseudoreal.errors import ClientError, Conflict, JobEnded, JobFailed, NamespaceConflict, Unreadable, WaitTimeout
from pseudoreal.first_rank import is_of_rank_0
from pseudoreal.job import Job
from pseudoreal.logs import Logs, Selection
from pseudoreal.metrics import Row, rows_of_log
from pseudoreal.observed_job import ObservedJob, one_line
from pseudoreal.pods import has_started
from pseudoreal.watch import Watch

Json = dict[str, Any]
Until = str | Callable[[PseudoRealJobStatus], bool]
Jobs = list[Job]
_ObservedJobs = list[ObservedJob]
Rows = list[Row]

_TRIES = 10
"""Maximum number of attempts to patch a job. The operator writes the status every few seconds, so a patch of the object
just read rarely conflicts twice."""
_STATES = ("Pending", "Queued", "Training", "Delinking", "Restarting", "Suspended", "Complete", "Failed")
"""Words of status.state."""
_MOST_ROWS = 100_000
"""Maximum number of log lines per pod that are read for metrics, the newest ones."""


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


class Client:
    """Jobs of one namespace of a cluster.

    `context` and `kubeconfig` choose the cluster as for kubectl: by default KUBECONFIG, the user's own kubeconfig, or,
    in a pod, its service account. `namespace`: by default that of the context. `warn` receives a sentence about each
    object or log that cannot be read while others can. No request is sent before the first call.

    >>> client = Client()
    >>> job = client.submit(Job.from_yaml("examples/quickstart.yaml"))
    >>> client.get("quickstart").status.state
    'Pending'
    """

    def __init__(
        self,
        context: str | None = None,
        namespace: str | None = None,
        *,
        kubeconfig: str | None = None,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        connection = connect(context, namespace, kubeconfig, warn)
        self.namespace = connection.namespace
        self.names_namespace = connection.is_named
        """Whether the caller named the namespace; else the context did."""
        self.api: Api = connection.api
        """Requests as JSON."""
        self._warn = warn

    def submit(self, job: Job | Mapping[str, Any], *, dry_run: bool = False) -> Job:
        """Create the job and return it as stored. `job`: a Job, or an object as read from YAML. `dry_run`: the API
        server checks the job and stores nothing.

        The job's own namespace counts if it names one. Raises Rejected with the API server's sentences, AlreadyExists,
        and NamespaceConflict.

        >>> job = Job.from_yaml("examples/quickstart.yaml")
        >>> Client().submit(job, dry_run=True).spec.optimizer.learning_rate
        '5e-3'
        """
        return Job.from_object(self.create(job.to_object() if isinstance(job, Job) else job, dry_run=dry_run).body)

    def create(self, body: Mapping[str, Any], *, dry_run: bool = False) -> ObservedJob:
        """Create the job of an object and return it as it was sent, whichever release wrote it."""
        if not isinstance(body.get("metadata"), Mapping):
            raise InvalidJob("the object has no metadata; write metadata: {name: NAME}")
        own = body["metadata"].get("namespace")
        if own and self.names_namespace and own != self.namespace:
            raise NamespaceConflict(own, self.namespace)
        return ObservedJob(self.api.create_job(dict(body), own or self.namespace, dry_run=dry_run))

    def get(self, name: str) -> Job:
        """Return the job with its status. Raises NotFound."""
        return Job.from_object(self.observe(name).body)

    def list(self, *, all_namespaces: bool = False) -> Jobs:
        """Return the jobs. Jobs that this release cannot read are left out, with a warning.

        >>> [job.name for job in Client().list()]
        ['quickstart']
        """
        return [*self._readable(self.observe_all(all_namespaces=all_namespaces))]

    def _readable(self, jobs: _ObservedJobs) -> Iterator[Job]:
        for job in jobs:
            try:
                yield Job.from_object(job.body)
            except Unreadable as error:
                self._warn(error.message)

    def observe(self, name: str) -> ObservedJob:
        """Return the job as it was sent, whichever release wrote it."""
        return ObservedJob(self.api.job(self.namespace, name))

    def observe_all(self, *, all_namespaces: bool = False) -> _ObservedJobs:
        # Items of a list lack kind and apiVersion.
        head = {"apiVersion": API_VERSION, "kind": KIND}
        return [ObservedJob(head | body) for body in self.api.each(KIND, None if all_namespaces else self.namespace)]

    def watch(self, name: str) -> Watch:
        """Return the statuses of the job as they come: the present one, then each change, until the job has ended.

        Lost connections are made again. `break` out of the loop, or `close` it.

        >>> for status in Client().watch("quickstart"):
        ...     print(status.state, status.current_phase, status.progress and status.progress.loss)
        ...     break
        Pending None None
        """
        return Watch(self.api, self.namespace, name)

    def wait(self, name: str, until: Until = "Complete", timeout: float | None = None) -> PseudoRealJobStatus:
        """Wait until the job is in the state `until`, or until the function `until` is true of its status; return that
        status. `timeout`: seconds; None: no limit.

        Raises JobFailed, JobEnded if the job ends otherwise, WaitTimeout, and JobDeleted.

        >>> Client().wait("quickstart", until="Pending", timeout=10).execution
        0
        """
        check_awaited(until)
        status: PseudoRealJobStatus | None = None
        with self.watch(name) as watch, _closed_after(watch, timeout):
            for status in watch:
                if has_reached(until, status, name):
                    return status
        raise timed_out(until, status, name, timeout)

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        previous: bool = False,
        follow: bool = False,
        tail: int | None = None,
    ) -> Logs:
        """Return the lines of the logs of the job's pods, of its newest execution.

        `rank`: only the pod of this rank. `previous`: the execution before the newest. `follow`: until the job ends,
        through all its executions. `tail`: number of newest lines of each pod.
        """
        return Logs(self.api, self.namespace, name, Selection(rank, previous, follow, tail), self._warn)

    def metrics(self, name: str) -> Rows:
        """Return a row for each progress line of the logs of rank 0, for pandas.DataFrame: at most one a second.

        Logs are those of the pods that still exist. All steps are in metrics.jsonl, which `read_metrics` reads, in the
        job's object storage for instance.
        """
        job = self.observe(name)
        executions = job.executions(self.api.each("Pod", job.namespace, job.selector))
        firsts = [pod for pods in executions for pod in pods if has_started(pod) and is_of_rank_0(job, pod)]
        return rows_of_log(line for pod in firsts for line in self._newest_lines(job.namespace, pod.name))

    def _newest_lines(self, namespace: str, pod: str) -> Iterator[str]:
        try:
            yield from self.api.log(namespace, pod, tail=_MOST_ROWS)
        except ClientError as error:
            self._warn(f"the metrics of pod {pod} are not whole: {error.message}")

    def suspend(self, name: str) -> str:
        """Make the job save a checkpoint and free its pods; return a sentence on the effect. Raises NoEffect.

        >>> Client().suspend("quickstart")
        'quickstart saves a checkpoint and frees its pods'
        """
        return self._change(name, changes.suspend)

    def resume(self, name: str) -> str:
        """Make the suspended job go on; return a sentence on the effect. Raises NoEffect.

        >>> Client().resume("quickstart")
        'quickstart goes on'
        """
        return self._change(name, changes.resume)

    def finish_phase(self, name: str, phase: str | None = None) -> str:
        """End the phase now, through a committed checkpoint; None: the phase in training. Return a sentence on the
        effect. Raises NoEffect, and NotFound for an unknown phase."""
        return self._change(name, lambda job: changes.finish_phase(job, phase))

    def repeat_phase(self, name: str, phase: str) -> str:
        """Train the phase again from the checkpoint that it started from, and all phases after it. Return a sentence on
        the effect. Raises NoEffect, and NotFound for an unknown phase."""
        return self._change(name, lambda job: changes.repeat_phase(job, phase))

    def delete(self, name: str) -> None:
        """Delete the job and, in the background, its pods. Checkpoints stay where they are, unless the operator made
        their claim for this job.

        >>> Client().delete("quickstart")
        """
        self.api.delete_job(self.namespace, name)

    def _change(self, name: str, wanted: Callable[[ObservedJob], Change]) -> str:
        for left in reversed(range(_TRIES)):
            job = self.observe(name)
            change = wanted(job)
            try:
                self.api.patch_job(self.namespace, name, change.patch(job))
            except Conflict:
                if not left:
                    raise
            else:
                return change.effect
        raise AssertionError("the last attempt returns or raises")


def check_awaited(until: Until) -> None:
    """Raise ValueError for a state that no job has."""
    if isinstance(until, str) and until not in _STATES:
        raise ValueError(f"until={until!r} is no state of a job; the states are {', '.join(_STATES)}")


def has_reached(until: Until, status: PseudoRealJobStatus, name: str) -> bool:
    """Return whether the status is the awaited one. Raises JobFailed or JobEnded if the job has ended otherwise."""
    if status.state == until if isinstance(until, str) else until(status):
        return True
    if status.completion_time is None:
        return False
    failed = next((one for one in status.conditions if one.type == "Failed" and one.status == "True"), None)
    if status.state == "Failed" or failed is not None:
        reason = f": {one_line(failed.message)}" if failed else ""
        raise JobFailed(f"job {name} failed{reason}", status)
    raise JobEnded(f"job {name} has ended ({status.state}) and was not {_words(until)} before", status)


def timed_out(until: Until, status: PseudoRealJobStatus | None, name: str, timeout: float | None) -> WaitTimeout:
    assert timeout is not None, "without a timeout, a wait ends with the job"
    state = f"; it is {status.state}" if status else ""
    return WaitTimeout(f"job {name} was not {_words(until)} within {timeout:g} seconds{state}", status)


def _words(until: Until) -> str:
    return until if isinstance(until, str) else "as awaited"


@contextmanager
def _closed_after(watch: Watch, seconds: float | None) -> Iterator[None]:
    """Close the watch after some seconds, from another thread: it may wait for the API server all the while."""
    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, watch.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
