"""Specs as passes have read them: a spec is read once for each of its generations, and so is what follows from it alone
(`remembered`)."""

from typing import Any

from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec

Json = dict[str, Any]

MOST_BYTES = 2**21
"""Most bytes of the specs that are kept, as JSON; in memory they take about twelve times as many."""
_Key = tuple[str, int]


class Specs:
    """The specs that were read last, by uid and generation of their jobs."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: dict[_Key, tuple[PseudoRealJobSpec, int]] = {}
        self._bytes = 0

    def job(self, body: Json) -> PseudoRealJob:
        """Return the job that an object of the API server describes. Raises ValidationError."""
        metadata = JobMetadata.model_validate(body["metadata"])
        key = (metadata.uid, metadata.generation)
        if known := self._kept.pop(key, None):
            self._kept[key] = known
            return PseudoRealJob(metadata=metadata, spec=known[0])
        job = PseudoRealJob.from_object(body)
        self._keep(key, job.spec)
        return job

    def _keep(self, key: _Key, spec: PseudoRealJobSpec) -> None:
        size = len(spec.to_json())
        if size > self._most:
            return
        self._kept[key], self._bytes = (spec, size), self._bytes + size
        while self._bytes > self._most:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self._bytes -= dropped
