"""Layout chosen for a phase with `layout: Auto`, as recorded, reported, and shown in the status."""

from typing import Annotated

from pydantic import ConfigDict, Field

from pseudoreal_api.base import ApiModel

MOST_RANKS = 2**31 - 1
"""Maximum number of ranks, or of micro-batches, accepted from outside."""

_Ranks = Annotated[int, Field(ge=0, le=MOST_RANKS)]
_Word = Annotated[str, Field(max_length=64, pattern="^[A-Z0-9][A-Za-z0-9]*$")]


class ChosenLayout(ApiModel):
    """Automatically chosen layout, with the estimate behind the choice."""

    # Unknown fields are ignored: the layout may come from a later release than its reader.
    model_config = ConfigDict(extra="ignore")

    pipeline: _Ranks = Field(description="pipeline is the chosen number of pipeline ranks.")
    replicas: _Ranks = Field(description="replicas is the chosen number of groups of data-parallel ranks.")
    expert_ranks: _Ranks = Field(
        description="expertRanks is the chosen number of ranks over which experts are distributed."
    )
    context_ranks: _Ranks = Field(
        1, description="contextRanks is the chosen number of ranks over which each sequence is cut."
    )
    tensor_ranks: _Ranks = Field(
        1, description="tensorRanks is the chosen number of ranks over which the matrices of layers are cut."
    )
    schedule: _Word = Field(description="schedule is the chosen order of forward and backward passes.")
    state_sharding: _Word = Field(description="stateSharding says what is sharded over the data-parallel ranks.")
    micro_batches: _Ranks = Field(description="microBatches is the chosen number of micro-batches of a step.")
    keep: _Word = Field(description="keep says which activations are saved for the backward pass.")
    hardware: str = Field(
        max_length=256, description="hardware is the name of the hardware profile for which the layout was chosen."
    )
    step_time: str = Field(max_length=32, description="stepTime is the predicted time of a training step, in seconds.")
    bottleneck: str = Field(
        max_length=512, description="bottleneck is a sentence that names the resource which limits the time of a step."
    )
