"""The manifest of a checkpoint (docs/checkpoint-format.md). The manifest is written last; without a manifest, a
checkpoint does not exist."""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

from pseudoreal_api.base import ApiModel, DnsLabel
from pseudoreal_api.resolved.config import JobIdentity, PhaseConfig
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import OptimizerState, Sharing
from pydantic import Field, model_validator

from pseudoreal_trainer.checkpoint import format_4
from pseudoreal_trainer.data.block_order import BlockOrder
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.plan.units import (
    Kind,
    are_experts,
    block_name,
    block_of,
    experts_name,
    is_residual_output,
    is_router,
)

FORMAT_VERSION: Literal[5] = 5
"""Version of the format that is written."""
READABLE_VERSIONS = range(format_4.VERSION, FORMAT_VERSION + 1)
"""Versions of the format that are read. Each has a reader, and checkpoints in tests/data/checkpoints."""
WEIGHTS_FILE, MOMENTS_FILE = FILES = ("weights-{:05d}.safetensors", "moments-{:05d}.safetensors")
"""Patterns of the names of a rank's two files; the argument is the number of the rank."""

# Names in a manifest become parts of paths. Neither a slash nor two dots fit these patterns.
CheckpointName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?-[0-9]{8,20}$")]
FileName = Annotated[str, Field(pattern=r"^(weights|moments)-[0-9]{5,20}\.safetensors$")]


def checkpoint_name(phase: str, step: int) -> str:
    return f"{phase}-{step:08d}"


def entry_name(tensor: str, kind: Kind, begin: int, *, is_alone: bool) -> str:
    """Return the entry name, in a rank's file, of the part of a tensor that starts at element `begin`. `is_alone`:
    True if the file has only one part of the tensor; with groups of experts, the file may have several."""
    return of_kind(tensor if is_alone else f"{tensor}.from-{begin}", kind)


def of_kind(name: str, kind: Kind) -> str:
    """Return the entry name of the vector of this kind."""
    return name if kind == "weights" else f"{name}.{kind}"


class FileDigest(ApiModel):
    sha256: str
    size: int = Field(description="Bytes.")


class Piece(ApiModel):
    file: int = Field(description="Number of the pair of files, weights and moments, that holds it.")
    begin: int = Field(description="First element, in the order of the tensor's columnSlices.")
    end: int = Field(description="Behind the last element.")


class StoredTensor(ApiModel):
    shape: tuple[int, ...]
    dtype: str = Field(description="Of the weights.")
    moment_dtype: str | None = Field(None, description="Of both moments. None: the same as of the weights.")
    has_second_moment: bool = Field(True, description="False: Muon updates the tensor, and the files have none.")
    column_slices: int = Field(
        1,
        ge=1,
        description="Number of equal slices of the tensor's columns. The elements of each slice are counted in C order,"
        " one slice after the other. 1: the elements of the tensor are counted in C order.",
    )
    pieces: list[Piece] = Field(description="They cover the tensor, in order, each element once.")

    @model_validator(mode="after")
    def _check_slices(self) -> "StoredTensor":
        if self.column_slices > 1 and (len(self.shape) != 2 or self.shape[1] % self.column_slices):
            raise ValueError(f"a tensor of the shape {self.shape} has no {self.column_slices} equal slices of columns")
        return self


class Updates(ApiModel):
    """Optimizer steps since the moments were zero; AdamW's bias correction follows from these counts."""

    others: int = Field(description="Of the embedding, the final norm and the head.")
    blocks: int
    left_out: dict[str, int] = Field(
        {}, description="Of these, by the name of a unit, those that were left out: its gradients were not finite."
    )

    def of(self, unit: str) -> int:
        """Return the number of optimizer steps of the unit with this name."""
        return (self.others if block_of(unit) is None else self.blocks) - self.left_out_of(unit)

    def left_out_of(self, unit: str) -> int:
        """Return the number of steps that skipped the unit. Experts without an entry have their block's count: before
        release 0.4, experts were a part of their block."""
        return self.left_out.get(unit, self.left_out.get(unit.removesuffix(".experts"), 0))

    def and_one(self, left_out: Collection[str], *, has_experts: bool) -> "Updates":
        """Return the counts after one more step. `left_out`: names of the units skipped by the step. `has_experts`:
        True if blocks have experts, which get entries of their own from here on."""
        blocks = [block for unit in left_out if (block := block_of(unit)) is not None]
        experts = set(map(experts_name, blocks)) if has_experts else set()
        named = {*self.left_out, *left_out, *experts}
        counts = {unit: self.left_out_of(unit) + (unit in left_out) for unit in named}
        return Updates(others=self.others + 1, blocks=self.blocks + 1, left_out=dict(sorted(counts.items())))


class Skipped(ApiModel):
    """Counts of training steps that skipped an update because a loss or gradient was not finite."""

    steps: int = Field(0, description="From the job's start.")
    in_a_row: int = Field(0, description="The newest, without any other step between.")


Moment = Literal["first_moment", "second_moment"]


class Link(ApiModel):
    """Source of a delinked or grown checkpoint's tensors: the files of another checkpoint, under other block numbers,
    with divided moments. Where the model has more experts than the files, expert j is read as expert j modulo the
    number in the files."""

    folder: CheckpointName = Field(description="Name of the checkpoint, beside this one, that holds the files.")
    blocks: list[int] = Field(description="Entry b is the block in those files that block b is read from.")
    first_moment_divisor: float = Field(description="Of the first moments of blocks. 0: they are zero.")
    second_moment_divisor: float = Field(description="Of the second moments of blocks. 0: they are zero.")
    experts: dict[int, int] = Field(
        {}, description="Number of experts -> those in the files that they are read from. Empty: as blocks says."
    )
    experts_first_moment_divisor: float | None = Field(None, description="Of those of experts. None: as of blocks.")
    experts_second_moment_divisor: float | None = Field(None, description="Of those of experts. None: as of blocks.")
    routers_first_moment_divisor: float | None = Field(None, description="Of those of routers. None: as of blocks.")
    routers_second_moment_divisor: float | None = Field(None, description="Of those of routers. None: as of blocks.")
    zero_outputs: list[str] = Field(
        [], description="Names of the units in which weights whose output is added to the residual stream are zero."
    )
    second_moment_divisors: dict[str, list[float]] = Field(
        {},
        description="Instead of it, by the names of tensors in those files: what was measured. One number; of a"
        " stacked tensor one for each expert.",
    )

    def source(self, name: str) -> int:
        """Return the number, in the linked files, of the block or the experts that the tensor `name` belongs to."""
        number = block_of(name)
        assert number is not None, "only tensors of blocks and experts are linked"
        return self.experts[number] if self.experts and are_experts(name) else self.blocks[number]

    def is_zero(self, name: str) -> bool:
        """Return whether the weights of the tensor are zero."""
        number = block_of(name)
        unit = "" if number is None else experts_name(number) if are_experts(name) else block_name(number)
        return unit in self.zero_outputs and is_residual_output(name)

    def is_copy(self, name: str) -> bool:
        """Return whether the block, or the set of experts, of the tensor `name` has the same source as one with a lower
        number."""
        number, source = block_of(name), self.source(name)
        if self.experts and are_experts(name):
            return number != min(other for other, found in self.experts.items() if found == source)
        return number != self.blocks.index(source)

    def divisor_of(self, name: str, kind: Moment) -> float:
        """Return the divisor of a tensor's moments, without regard to measured divisors."""
        first = second = None
        if are_experts(name):
            first, second = self.experts_first_moment_divisor, self.experts_second_moment_divisor
        elif is_router(name):
            first, second = self.routers_first_moment_divisor, self.routers_second_moment_divisor
        if kind == "first_moment":
            return self.first_moment_divisor if first is None else first
        return self.second_moment_divisor if second is None else second


class Measurement(ApiModel):
    """Squared gradients, measured in the last steps of a phase. The delink computes the divisors of second moments from
    them."""

    next_sharing: Sharing = Field(description="The blocks whose gradients these are.")
    steps: int = Field(description="That were measured.")
    shared: dict[str, list[float]] = Field(
        description="By tensor of a block: sum over the steps of the squares of its gradient's elements. One number; of"
        " a stacked tensor one for each expert."
    )
    single: dict[str, list[float]] = Field(
        description="The same of the gradient that a block of the next phase would have, in the mean over those blocks."
    )


class Ending(ApiModel):
    """Progress of a phase towards an early end: by its loss, a check or a request, before its step and token limits."""

    checks: int = Field(0, description="Checks of the gradients' correlation in a row that were met.")
    step: int | None = Field(None, description="Step at which the phase ends, once its loss or a check said so.")


class Random(ApiModel):
    """The random order of samples. Training draws no other random numbers. The permutation keys of epoch e start with
    [seed, e]."""

    generator: Literal["feistel-splitmix64-v1"] = "feistel-splitmix64-v1"
    seed: int
    mixture: Literal["earliest-deadline-v1"] | None = Field(
        None, description="Which source comes when, by the weights. None: the corpus is text."
    )
    blocks: dict[str, BlockOrder] | None = Field(
        None, description="The sources whose windows are shuffled by blocks, as they began on object storage."
    )


class Head(ApiModel):
    """A manifest without tensors and files: a few kilobytes, for any number of ranks that saved the checkpoint."""

    format: Literal["pseudoreal checkpoint"] = "pseudoreal checkpoint"
    format_version: Literal[5] = FORMAT_VERSION
    files_version: Literal[4] | None = Field(
        None, description="Version of the format of the files, if they are older than the manifest."
    )
    job: JobIdentity
    execution: int
    phase: DnsLabel
    phase_index: int
    model: Model
    sharing: Sharing
    random: Random
    corpus: CorpusIdentity = Field(description="That it was trained on.")
    step: int = Field(ge=0, lt=10**20, description="Steps done, from the job's start.")
    phase_begin: int = Field(0, description="Step at which the phase began.")
    tokens: int = Field(description="Tokens trained, from the job's start.")
    global_cursor: int = Field(description="Samples consumed, from the job's start.")
    consumed: dict[str, int] | None = Field(
        None, description="Samples consumed of each source, from the job's start. None: the corpus is text."
    )
    mixture_begin: int | None = Field(
        None, description="The global cursor at which the mixture of the phase began. None: the corpus is text."
    )
    loss: float | None = Field(None, description="Training loss of the newest step with a finite one.")
    start_validation_loss: float | None = Field(None, description="Before the phase's first step, once measured.")
    validation_loss: float | None = Field(None, description="The newest of this phase.")
    phase_complete: bool
    ending: Ending = Ending()
    measurement: Measurement | None = Field(None, description="So far, of this phase.")
    delinked: bool = Field(description="Written by a delink: the start of its phase.")
    parent: str | None = Field(None, description="Checkpoint that this one continues.")
    optimizer_state: OptimizerState | None = Field(
        None, description="What the delink that began this phase did to the moments of blocks. None: the first phase."
    )
    imported: dict[str, Any] | None = Field(
        None, description="config.json of the weights that the job began with. None: they were random."
    )
    updates: Updates = Updates(others=0, blocks=0)
    skipped: Skipped = Skipped()
    link: Link | None = Field(None, description="Where the tensors are, if not in this folder.")

    @model_validator(mode="before")
    @classmethod
    def _from_version_4(cls, given: Any) -> Any:
        is_old = isinstance(given, dict) and given.get("formatVersion") == format_4.VERSION
        return format_4.as_version_5(given) if is_old else given

    def revised(self, **fields: Any) -> Self:
        """Return a copy with other values in these fields. Raises ValidationError for an unknown field or a wrong
        type."""
        return type(self).model_validate({**dict(self), **fields})

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the manifest as JSON. Raises ValueError if a number is not finite: pydantic would write null."""
        try:
            json.dumps(self.model_dump(exclude={"tensors", "files"}), allow_nan=False)
        except ValueError as error:
            raise ValueError(f"the manifest of checkpoint {self.name} has a number that is not finite") from error
        return super().to_json(indent=indent)

    @property
    def name(self) -> str:
        return checkpoint_name(self.phase, self.step)

    def ends_phase(self, config: PhaseConfig) -> bool:
        """Return True if the phase of this configuration is over at this checkpoint. A phase that ended at its step or
        token limit goes on once the limit has grown; a phase that was ended by its loss, a check or a request does
        not."""
        tokens, early = config.until.tokens, self.ending.step
        return self.phase_complete and (
            self.step >= config.phase_steps
            or (tokens is not None and self.tokens >= tokens)
            or (early is not None and self.step >= early)
        )

    @property
    def is_boundary(self) -> bool:
        """True for the first and the last checkpoint of a phase."""
        return self.phase_complete or self.delinked

    @property
    def data_folder(self) -> str:
        """Name of the checkpoint with the files that hold the tensors."""
        return self.name if self.link is None else self.link.folder


class Manifest(Head):
    # Last in the file: `manifest_text` writes tensors and files after the head, and readers of a head stop before them.
    tensors: dict[str, StoredTensor] = Field({}, description="By their names in the files.")
    files: dict[FileName, FileDigest] = Field({}, description="All files that hold tensors.")

    @property
    def head(self) -> Head:
        """The same manifest without tensors and files."""
        return Head.model_construct(**{name: getattr(self, name) for name in Head.model_fields})

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())
