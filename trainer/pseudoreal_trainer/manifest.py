"""What a checkpoint says of itself. The manifest is written last: a checkpoint without one does not exist."""

from typing import Literal

from pseudoreal_api.base import ApiModel
from pseudoreal_api.model_spec import Model
from pseudoreal_api.phase_spec import Sharing
from pseudoreal_api.resolved import JobIdentity
from pydantic import Field


class FileDigest(ApiModel):
    sha256: str
    size: int = Field(description="Bytes.")


class Manifest(ApiModel):
    format_version: Literal[1] = 1
    job: JobIdentity
    attempt: int
    phase: str
    phase_index: int
    model: Model
    sharing: Sharing
    step: int = Field(description="Steps done, from the job's start.")
    tokens: int = Field(description="Tokens trained, from the job's start.")
    global_cursor: int = Field(description="Samples consumed, from the job's start.")
    loss: float | None = Field(None, description="Training loss of the newest step.")
    start_validation_loss: float | None = Field(None, description="Before the phase's first step, once measured.")
    validation_loss: float | None = Field(None, description="The newest of this phase.")
    phase_complete: bool
    delinked: bool = Field(description="Written by a delink: the start of its phase.")
    parent: str | None = Field(None, description="Checkpoint that this one continues.")
    files: dict[str, FileDigest] = Field({}, description="Of the other files in the folder.")

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.step:08d}"

    @property
    def is_boundary(self) -> bool:
        """The first or last checkpoint of a phase."""
        return self.phase_complete or self.delinked
