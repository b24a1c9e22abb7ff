"""The user's requests that are still open. Pure."""

from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.request import Request, RequestType
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_operator.changes import status_with


def open_requests(spec: PseudoRealJobSpec, status: PseudoRealJobStatus, kind: RequestType) -> list[Request]:
    return [request for request in spec.requests if request.type == kind and request.id not in status.served_requests]


def phases_to_finish(spec: PseudoRealJobSpec, status: PseudoRealJobStatus) -> frozenset[str]:
    """Return the names of the phases that are to end now, or as soon as they train."""
    return frozenset(request.phase for request in open_requests(spec, status, "FinishPhase"))


def with_served(spec: PseudoRealJobSpec, status: PseudoRealJobStatus) -> PseudoRealJobStatus:
    """Return the status with the requests marked as served whose phases are complete. Ids that are gone from the
    spec are dropped, so that the list stays short."""
    complete = {phase.name for phase in status.phases if phase.state == "Complete"}
    done = {request.id for request in open_requests(spec, status, "FinishPhase") if request.phase in complete}
    asked = [request.id for request in spec.requests]
    served = [id for id in asked if id in done or id in status.served_requests]
    return status_with(status, served_requests=served)
