"""Memory of all jobs and their children, kept by the watches. Used in the event loop's thread only.

Each object is parsed once per version. The memory is always a little behind the API server, and the watches of
different kinds are behind by different times. So a pass may use it for routine changes of the status alone (see
`lifecycle/routine.py`), and reads from the API server what anything else depends on. In some cases the memory is known
to be behind; then a pass does not use it at all:

- a watch has not listed its objects yet, its connection is cut, or it has yet to tell what happened while it was cut;
- the watch of jobs has ended, or the jobs have not been listed since it began;
- a write of the operator, or a newer version that a pass has read, has not arrived through the watch;
- a pass has failed, or a child cannot be read.
"""

import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from pseudoreal_api.names import LABEL_JOB, LABEL_JOB_UID

from pseudoreal_operator.observe.reading import belongs_to, has_no_pod_left, is_orphan, read_job, read_pod
from pseudoreal_operator.observe.view import ChildJob, Pod, Pods

Json = dict[str, Any]
JobName = tuple[str, str]
"""Namespace and name of a job."""

KINDS = ("Job", "Pod")
"""Kinds of children that are watched."""
POD_JOB = "batch.kubernetes.io/job-name"
"""Label of a pod with the name of its Job, set by the Job controller."""
CONFIRM_SECONDS = 27_000.0
"""Seconds after which a pass reads a job from the API server again, in case a watch has missed something."""
NEVER = 2**63
"""Version that no watch tells: the memory is behind an object without a readable version."""
MOST_JOB_BYTES = 2**18
"""Largest job that is kept, in bytes of JSON; larger jobs are read for each pass."""
MOST_KEPT_BYTES = 2**26
"""Maximum bytes of all kept jobs, compressed; other jobs are read for each pass. One namespace may have a quarter: no
tenant alone can fill the memory."""


class Child(NamedTuple):
    """A child, or another object with the label of a job, in one version."""

    name: str
    version: int
    job_uid: str | None
    """Uid of the job by the object's label; None: it has no such label."""
    is_own: bool
    """Whether labels and owners agree that the object belongs to the job of `job_uid`."""
    is_orphan: bool
    read: Pod | ChildJob | None
    """The parsed object; None: it cannot be parsed."""
    job: str = ""
    """Name of a pod's Job."""
    is_finished: bool = False
    """Whether a Job has ended and none of its pods is active or terminating."""

    def says_the_same(self, other: "Child") -> bool:
        """Return whether a pass would read the same from both, versions aside; False if this one cannot be parsed."""
        return self.read is not None and self._replace(version=other.version) == other

    @property
    def is_leaving(self) -> bool:
        if isinstance(self.read, ChildJob):
            return self.read.deleting
        return self.read is not None and self.read.deletion_deadline is not None


class Change(NamedTuple):
    """A change that a watch has told; None: the object was not known, or is gone."""

    before: Child | None
    after: Child | None


@dataclass(frozen=True)
class Children:
    """Children of one job at one moment. While nothing changes, the same object is returned."""

    jobs: tuple[ChildJob, ...]
    finished: tuple[ChildJob, ...]
    """The elements of `jobs` that have ended; none of their pods is active or terminating."""
    pods: dict[str, Pods]
    """Name of a Job -> its pods."""
    of_deleted_job: tuple[str, ...]
    """Names of children of a deleted job of the same name."""
    orphans: tuple[str, ...]
    """Names of pods of the job without a Job."""
    _pods_without: dict[frozenset[str], Pods] = field(default_factory=dict)

    def pods_without(self, jobs: frozenset[str]) -> Pods:
        """Return the pods of all Jobs but these: the same tuple object for the same `jobs`, because Sightings compares
        by identity."""
        if jobs not in self._pods_without:
            found = [pods for job, pods in self.pods.items() if job not in jobs]
            self._pods_without[jobs] = found[0] if len(found) == 1 else Pods(chain.from_iterable(found))
        return self._pods_without[jobs]


@dataclass
class _Family:
    """All objects with the label of one job name."""

    children: dict[str, dict[str, Child]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """Kind -> uid -> child."""
    awaited: dict[str, int] = field(default_factory=dict)
    """Kind -> version that the watch must have told before the memory is used."""
    ending: dict[str, str] = field(default_factory=dict)
    """Uid -> kind of children that the operator has deleted: the memory is not used before the watch tells that they
    end."""
    gone: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Uid -> kind of children that a pass did not find any more, and version of the list without them: the memory is
    not used before the watch tells that they are gone, or that they have changed since."""
    snapshots: dict[str, Children] = field(default_factory=dict)
    """Uid of a job -> its children, since the last change."""


class _Job(NamedTuple):
    """A job. `version`: newest version that was listed, read, written or told."""

    uid: str
    version: int
    data: bytes | None
    """Compressed JSON of that version; None: that version was only told, is too large to be kept, or has ended."""
    confirmed: float
    """Time of the monotonic clock at which the job was last read from the API server."""


class WatchedKind:
    """What one watch has told of its kind, in one namespace or all."""

    def __init__(self, memory: "Memory", kind: str, namespace: str | None) -> None:
        self._memory, self.kind, self.namespace = memory, kind, namespace
        self.version = 0
        """Version up to which the watch has told all changes; 0: not listed yet."""
        self._missed = 0
        """Version up to which changes have happened while the watch was cut."""
        self._is_connected = False

    @property
    def is_current(self) -> bool:
        return self._is_connected and self.version > 0 and self.version >= self._missed

    def connected(self) -> None:
        self._is_connected = True

    def cut(self) -> None:
        self._is_connected = False

    def told(self, version: str) -> None:
        """Note that all changes up to this version have been told."""
        self.version = max(self.version, version_of(version))

    def missed(self, version: str) -> None:
        """Note that the watch, which was cut, has yet to tell the changes up to this version."""
        self._missed = max(self._missed, version_of(version) or NEVER)

    def list_again(self) -> "_Listing":
        """Return an empty list for the present objects. Until `finish`, the memory is not used."""
        self.version = self._missed = 0
        return _Listing(self._memory, self)


class _Listing:
    """Objects of a list, parsed one by one: the raw objects may be large and many."""

    def __init__(self, memory: "Memory", watched: WatchedKind) -> None:
        self._memory, self._watched = memory, watched
        self._found: dict[str, tuple[JobName, Child]] = {}
        """Uid -> name of the job by the object's label, and the object."""

    def add(self, body: Json) -> None:
        if (uid := body["metadata"].get("uid")) and "namespace" in body["metadata"]:
            self._found[str(uid)] = _job_name(body), _child(self._watched.kind, body)

    def finish(self, version: str) -> None:
        self._memory.replace(self._watched.kind, self._watched.namespace, self._found, version_of(version))
        self._watched.told(version)


class Memory:
    """Memory of all watched namespaces."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._watches: dict[tuple[str, str | None], WatchedKind] = {}
        self._families: defaultdict[JobName, _Family] = defaultdict(_Family)
        self._names: dict[str, JobName] = {}
        """Uid of a child -> job by its label."""
        self._jobs: dict[JobName, _Job] = {}
        self._kept: Counter[str] = Counter()
        """Namespace -> bytes of its kept jobs."""
        self._jobs_watched = False
        self._namespaces_listed: set[str | None] = set()
        """Namespaces (None: all) of which the jobs have been listed since the watch of jobs began."""
        self._distrusted: set[JobName] = set()

    # Told by the watches of children.

    def watch(self, kind: str, namespace: str | None) -> WatchedKind:
        """Return the store for the watch of this kind and namespace, always the same one."""
        return self._watches.setdefault((kind, namespace), WatchedKind(self, kind, namespace))

    def child_changed(self, kind: str, change: str, body: Json) -> Change:
        """Take in a change that a watch has told."""
        uid = body["metadata"]["uid"]
        name = self._names.get(uid)
        before = self._families[name].children[kind].get(uid) if name else None
        if change == "DELETED":
            self._remove(kind, uid)
            self._told(kind, body)
            return Change(before, None)
        after = _child(kind, body)
        if before is not None and name == _job_name(body) and after.version and after.version < before.version:
            return Change(before, before)
        self._store(kind, uid, _job_name(body), after)
        self._told(kind, body)
        return Change(before, after)

    def replace(self, kind: str, namespace: str | None, listed: dict[str, tuple[JobName, Child]], at: int) -> None:
        """Replace all objects of a kind in a namespace (None: all) by the objects of a list of version `at`."""
        for uid, name in list(self._names.items()):
            if namespace in (None, name[0]) and uid not in listed and uid in self._families[name].children[kind]:
                self._remove(kind, uid)
        for uid, (name, child) in listed.items():
            self._store(kind, uid, name, child)
            self._found_at(name, uid, at)

    def _told(self, kind: str, body: Json) -> None:
        watch = self._watch_of(kind, body["metadata"].get("namespace", ""))
        if watch is not None:
            watch.told(body["metadata"].get("resourceVersion", ""))

    def _watch_of(self, kind: str, namespace: str) -> WatchedKind | None:
        return self._watches.get((kind, namespace)) or self._watches.get((kind, None))

    def _store(self, kind: str, uid: str, name: JobName, child: Child) -> None:
        if self._names.get(uid, name) != name:  # its label has changed
            self._remove(kind, uid)
        family = self._families[name]
        known = family.children[kind].get(uid)
        if known is not None and known.says_the_same(child):
            child = known._replace(version=child.version)  # the parsed object stays the same, and so does the snapshot
        else:
            family.snapshots.clear()
        self._names[uid], family.children[kind][uid] = name, child
        if child.is_leaving:
            family.ending.pop(uid, None)
        self._found_at(name, uid, child.version)

    def _found_at(self, name: JobName, uid: str, version: int) -> None:
        """Note that an object existed at this version."""
        gone = self._families[name].gone
        if uid in gone and gone[uid][1] < version:
            del gone[uid]

    def _remove(self, kind: str, uid: str) -> None:
        name = self._names.pop(uid, None)
        if name is None:
            return
        family = self._families[name]
        family.children[kind].pop(uid, None)
        family.ending.pop(uid, None)
        family.gone.pop(uid, None)
        family.snapshots.clear()
        if not any(family.children.values()) and name not in self._jobs:
            del self._families[name]

    # Told by the watch of jobs, by lists of jobs, and by answers to reads and writes of jobs.

    def job_changed(self, change: str, body: Json) -> None:
        """Take in a change of a job. The watch of jobs tells only a part of the job, so a newer version that a pass has
        not read is only noted: the next pass reads it."""
        metadata = body["metadata"]
        name, version = (metadata["namespace"], metadata["name"]), version_of_object(body)
        known = self._jobs.get(name)
        if change == "DELETED":
            if known is not None and known.uid == metadata["uid"]:
                self.forget_job(name)
        elif known is None or version > known.version or not version:
            confirmed = known.confirmed if known and known.uid == metadata["uid"] else self._clock()
            self._set_job(name, _Job(metadata["uid"], version, None, confirmed))

    def keep_job(self, body: Json, *, is_write: bool = False) -> None:
        """Keep a whole job as a list, a read or the answer to a write (`is_write`) has it, unless the watch has told a
        newer version."""
        metadata = body["metadata"]
        name, version = (metadata["namespace"], metadata["name"]), version_of_object(body)
        known = self._jobs.get(name)
        if not version or (known is not None and version < known.version):
            return
        confirmed = known.confirmed if known and is_write else self._clock()
        self._set_job(name, _Job(metadata["uid"], version, _compressed(body), confirmed))

    def _set_job(self, name: JobName, job: _Job) -> None:
        """Keep a job, without its data if the kept jobs would take too many bytes."""
        self._drop_job(name)
        size, share = len(job.data or b""), self._kept[name[0]]
        if share + size > MOST_KEPT_BYTES // 4 or self._kept.total() + size > MOST_KEPT_BYTES:
            job, size = job._replace(data=None), 0
        self._jobs[name] = job
        self._kept += Counter({name[0]: size})

    def _drop_job(self, name: JobName) -> None:
        if (known := self._jobs.pop(name, None)) is not None:
            self._kept -= Counter({name[0]: len(known.data or b"")})

    def forget_job(self, name: JobName) -> None:
        self._drop_job(name)
        self._distrusted.discard(name)
        if name in self._families and not any(self._families[name].children.values()):
            del self._families[name]

    def jobs_unwatched(self) -> None:
        """Note that the watch of jobs has ended."""
        self._jobs_watched = False

    def jobs_missed(self) -> None:
        """Note that the watch of jobs has begun, or has begun again: changes may have been missed before."""
        self._jobs_watched = True
        self._namespaces_listed.clear()

    def jobs_listed(self, namespace: str | None) -> None:
        self._namespaces_listed.add(namespace)

    def has_jobs_of(self, namespace: str | None) -> bool:
        return bool({namespace, None} & self._namespaces_listed)

    # Told by passes.

    def wrote(self, kind: str, name: JobName, body: Json) -> None:
        """Note that the API server has this object: the memory is behind until the watch has told of its version."""
        self._await(kind, name, version_of_object(body))

    def _await(self, kind: str, name: JobName, version: int) -> None:
        awaited = self._families[name].awaited
        awaited[kind] = max(awaited.get(kind, 0), version or NEVER)

    def deleted(self, kind: str, name: JobName, children: Collection[str]) -> None:
        """Note that the operator has deleted the children of these names: the memory is behind until the watch has
        told."""
        if (family := self._families.get(name)) is None:
            return
        for uid, known in family.children[kind].items():
            if known.name in children and not known.is_leaving:
                family.ending[uid] = kind

    def was_read(
        self, kind: str, name: JobName, versions: dict[str, int], at: int, not_read: frozenset[str] = frozenset()
    ) -> None:
        """Note the present objects, as uid -> version, as a pass has read them in a list of version `at`: if they are
        newer than the memory, the memory is behind. `not_read`: names of Jobs whose pods were left out."""
        known = self._families[name].children[kind] if name in self._families else {}
        for uid, version in versions.items():
            if uid not in known or known[uid].version < version:
                self._await(kind, name, version)
            if name in self._families:
                self._found_at(name, uid, at)
        for uid, child in known.items():
            # An object that is newer than the list was told while the pass read it.
            if uid not in versions and child.version <= at and child.job not in not_read:
                self._families[name].gone[uid] = kind, at

    def distrust(self, name: JobName) -> None:
        """Let the next pass read everything from the API server, as after an error."""
        self._distrusted.add(name)

    def trust(self, name: JobName) -> None:
        self._distrusted.discard(name)

    # Read by passes.

    def job(self, name: JobName) -> Json | None:
        """Return the job; None if the memory does not have it, or is known to be behind for it or its children."""
        known = self._jobs.get(name)
        if known is None or known.data is None or name in self._distrusted:
            return None
        if not (self._jobs_watched and self.has_jobs_of(name[0])):
            return None
        if self._clock() - known.confirmed > CONFIRM_SECONDS:
            return None
        if not all(self.is_current(kind, name) for kind in KINDS):
            return None
        body: Json = json.loads(zlib.decompress(known.data))
        return body

    def is_current(self, kind: str, name: JobName) -> bool:
        """Return whether nothing is known that the watch of this kind has yet to tell of the job's children."""
        watch = self._watch_of(kind, name[0])
        if watch is None or not watch.is_current:
            return False
        family = self._families.get(name)
        if family is None:
            return True
        if watch.version < family.awaited.get(kind, 0):
            return False
        if kind in family.ending.values() or any(kind == one for one, _ in family.gone.values()):
            return False
        family.awaited.pop(kind, None)
        return True

    def children(self, name: JobName, uid: str) -> Children | None:
        """Return the children of a job; None if one of them cannot be read."""
        family = self._families.get(name)
        if family is None:
            return Children((), (), {}, (), ())
        if (known := family.snapshots.get(uid)) is not None:
            return known
        found = _snapshot(family, uid)
        if found is not None:
            family.snapshots[uid] = found
        return found


def _snapshot(family: _Family, uid: str) -> Children | None:
    """Return the children of the job; None if one of them cannot be read."""
    jobs, finished, pods = [], [], defaultdict[str, list[Pod]](list)
    of_deleted_job, orphans = [], []
    for child in (child for kind in KINDS for child in family.children[kind].values()):
        if child.job_uid != uid:
            of_deleted_job += [child.name] if child.job_uid is not None else []
        elif child.is_own and child.read is None:
            return None
        elif child.is_own and isinstance(child.read, Pod):
            pods[child.job].append(child.read)
        elif child.is_own and isinstance(child.read, ChildJob):
            jobs.append(child.read)
            finished += [child.read] if child.is_finished else []
        if child.is_orphan and child.job_uid == uid:
            orphans.append(child.name)
    return Children(
        jobs=tuple(jobs),
        finished=tuple(finished),
        pods={job: Pods(found) for job, found in pods.items()},
        of_deleted_job=tuple(of_deleted_job),
        orphans=tuple(orphans),
    )


def _child(kind: str, body: Json) -> Child:
    metadata = body["metadata"]
    labels = metadata.get("labels") or {}
    uid, version = labels.get(LABEL_JOB_UID), version_of_object(body)
    is_own, orphan, read, finished = False, False, None, False
    try:
        is_own = uid is not None and belongs_to(uid, body)
        orphan = kind == "Pod" and uid is not None and is_orphan(uid, body)
        if "spec" in body or "status" in body:  # else it is beyond the bounds, and only its metadata were told
            read = read_pod(body) if kind == "Pod" else read_job(body)
            finished = kind == "Job" and has_no_pod_left(body)
    except Exception:  # anyone can label a malformed object; the pass over the job reads it and reports the error
        read = None
    return Child(str(metadata.get("name")), version, uid, is_own, orphan, read, labels.get(POD_JOB, ""), finished)


def _compressed(job: Json) -> bytes | None:
    """Return the job as it is kept; None if it is too large, or has ended: an ended job has few passes."""
    conditions = (job.get("status") or {}).get("conditions") or []
    if any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions):
        return None
    metadata = {key: value for key, value in job["metadata"].items() if key != "managedFields"}
    data = json.dumps(job | {"metadata": metadata}, separators=(",", ":")).encode()
    return zlib.compress(data, 1) if len(data) <= MOST_JOB_BYTES else None


def _job_name(body: Json) -> JobName:
    metadata = body["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(LABEL_JOB, "")


def version_of_object(body: Json) -> int:
    return version_of(body["metadata"].get("resourceVersion") or "")


def version_of(text: str) -> int:
    """Return a resource version as a number: Kubernetes promises that versions of one kind are ordered numbers (KEP
    5504). 0 for anything else, which no watch waits for and no job in memory has."""
    return int(text) if text.isascii() and text.isdecimal() else 0
