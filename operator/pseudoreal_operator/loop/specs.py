"""Cache of parsed specs: a spec is parsed once for each of its generations, and so is everything computed from the
spec alone (`remembered`)."""

from typing import Any

from pseudoreal_api.spec.job import JobMetadata, PseudoRealJob, PseudoRealJobSpec

Json = dict[str, Any]

MOST_BYTES = 2**21
"""Maximum total size of the cached specs, in bytes of JSON; in memory they take about twelve times as much."""
_Key = tuple[str, int]


class Specs:
    """The most recently used specs, by uid and generation of their jobs."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._kept: dict[_Key, tuple[PseudoRealJobSpec, int]] = {}
        self._bytes = 0

    def job(self, body: Json) -> PseudoRealJob:
        """Return the job parsed from an object of the API server. Raises ValidationError."""
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
