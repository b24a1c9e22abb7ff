"""The initial list of all jobs, when the operator starts: a few long lists instead of separate requests by thousands of
passes.

A job with nothing to do is idle, and needs no pass until it changes. Nothing is written on the basis of these lists: if
anything is to be done, a pass reads the job again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.cluster.api import Name
from pseudoreal_operator.cluster.bounds import Unreadable
from pseudoreal_operator.lifecycle.plan import Plan, plan
from pseudoreal_operator.loop.reconcile import Dependencies
from pseudoreal_operator.observe.fetch import build_observed
from pseudoreal_operator.observe.reading import belongs_to, read_job, read_pod
from pseudoreal_operator.observe.report_store import JobKey
from pseudoreal_operator.observe.stages import most_pods, phases_to_finish
from pseudoreal_operator.observe.view import ChildJob, Pod, Pods
from pseudoreal_operator.status.conditions import has_ended

Json = dict[str, Any]


@dataclass(frozen=True)
class IdleJob:
    """An idle job: nothing is to be done about its object at `version`. `wait`: seconds until the next pass; None:
    wait for a change."""

    version: str
    wait: float | None


@dataclass
class _Children:
    jobs: list[ChildJob] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    are_strange: bool = False
    """Whether some objects with the job's label do not belong to the job, or cannot be read."""

    def take(self, kind: str, uid: str, body: Json) -> None:
        try:
            if not belongs_to(uid, body):
                self.are_strange = True
            elif kind == "Job":
                self.jobs.append(read_job(body))
            else:
                self.pods.append(read_pod(body))
        except Exception:  # anyone can label a malformed object; the pass over the job reports the error
            self.are_strange = True


async def find_idle_jobs(deps: Dependencies, requeue: Callable[[Name, float], None]) -> dict[Name, IdleJob]:
    """Return the idle jobs. `requeue`: called with the name of a job and a delay in seconds, to request a pass."""
    idle: dict[Name, IdleJob] = {}
    for namespace in deps.settings.namespaces or (None,):
        children = await _children(deps, namespace)
        async for body in deps.api.each("PseudoRealJob", namespace):
            name = Name(body["metadata"]["namespace"], body["metadata"]["name"])
            try:
                found = await _idle_job(
                    deps, body, children[name.namespace, body["metadata"]["uid"]], partial(requeue, name)
                )
            except Exception:  # one job must not keep the operator from all others; its pass reports the error
                found = None
            if found is not None:
                idle[name] = found
            # Yield to the other tasks, such as the renewal of the Lease.
            await asyncio.sleep(0)
    return idle


async def _children(deps: Dependencies, namespace: str | None) -> dict[JobKey, _Children]:
    found: dict[JobKey, _Children] = defaultdict(_Children)

    def skip(body: Json, _reason: Unreadable) -> None:
        metadata = body["metadata"]
        uid = (metadata.get("labels") or {}).get(LABEL_JOB_UID)
        if uid and "namespace" in metadata:
            found[metadata["namespace"], str(uid)].are_strange = True

    for kind in ("Job", "Pod"):
        async for body in deps.api.each(kind, namespace, LABEL_JOB, skipped=skip):
            metadata = body["metadata"]
            uid = str(metadata["labels"].get(LABEL_JOB_UID, ""))
            found[metadata["namespace"], uid].take(kind, uid, body)
    return found


async def _idle_job(
    deps: Dependencies, body: Json, children: _Children, requeue: Callable[[float], None]
) -> IdleJob | None:
    metadata = body["metadata"]
    if "deletionTimestamp" in metadata or children.are_strange:
        return None
    run = deps.planning_thread.run
    job = await run(deps.spec_cache.parse, body)
    if not job.spec.is_managed_here:
        return IdleJob(metadata["resourceVersion"], None)
    status = await run(PseudoRealJobStatus.model_validate, body.get("status") or {})
    if has_ended(status) or not status.phases:
        return None
    now = datetime.now(UTC)
    key, phases = (job.metadata.namespace, job.metadata.uid), phases_to_finish(job.spec, status)
    deps.report_store.follow(key, most_pods(job.spec), phases, requeue)
    observed = build_observed(deps.report_store, job, status, children.jobs, Pods(children.pods), now)
    wanted = await run(plan, observed, now, deps.settings)
    return IdleJob(metadata["resourceVersion"], wanted.requeue_after) if wanted == _nothing(wanted, status) else None


def _nothing(wanted: Plan, status: PseudoRealJobStatus) -> Plan:
    """Return the plan that changes nothing."""
    return Plan(status, requeue_after=wanted.requeue_after)
