"""Requests: one-time instructions of a user for a running job."""

from typing import Annotated, Literal

from pydantic import Field

from pseudoreal_api.base import ApiModel, DnsLabel

RequestType = Literal["FinishPhase", "RepeatPhase"]


class Request(ApiModel):
    """A request is served once; its id then stands in status.servedRequests."""

    id: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="id is a text of your choice that identifies the request among all requests of the job. A new"
        " request needs a new id."
    )
    type: RequestType = Field(
        description="type is the command. FinishPhase: end the phase now, or as soon as it starts to train, with a"
        " committed checkpoint. RepeatPhase: train the phase again from the checkpoint from which it started, and"
        " also the phases after it.",
    )
    phase: DnsLabel = Field(description="phase is the name of the phase to which the request applies.")
