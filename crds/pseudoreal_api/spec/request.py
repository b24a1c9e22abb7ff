"""Requests: one-time instructions of a user for a running job."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DnsLabel

RequestType = Literal["FinishPhase", "RepeatPhase"]


class Request(ApiModel):
    """A request is served once; its id then stands in status.servedRequests."""

    id: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="id tells this request from all others of the job; a new request needs a new one."
    )
    type: RequestType = Field(
        description="type says what is asked for. FinishPhase: the phase ends now, or as soon as it trains, through a"
        " committed checkpoint. RepeatPhase: the phase is trained again from the checkpoint that it started from, and"
        " so are the phases after it.",
    )
    phase: DnsLabel = Field(description="phase is the name of a phase of the job.")
