"""How far a phase is, and the manifest that says so in a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import OptimizerState

from pseudoreal_trainer.checkpoint.manifest import Ending, Manifest, Measurement, Random, Skipped, Updates
from pseudoreal_trainer.data.block_order import BlockOrder
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.engine.balance import ExpertLoad
from pseudoreal_trainer.engine.updates import REMEDY, Agreement
from pseudoreal_trainer.errors import TrainingError

MOST_IN_A_ROW = 10
"""Number of steps in a row that may be skipped. One bad batch passes by itself; a training that diverged does not."""


@dataclass
class Progress:
    """How far a phase is: the same on every rank at the same step. What all ranks decide together, they decide from
    this. Only the loop that trains changes it."""

    step: int = 0
    """Steps done, from the job's start."""
    cursor: int = 0
    """Samples consumed, from the job's start."""
    tokens: int = 0
    """Tokens trained, from the job's start."""
    loss: float | None = None
    """Training loss of the newest step with a finite one, nats per token."""
    gradient_norm: float | None = None
    """L2 norm of the newest step's gradient before clipping; None where clipping does not need it, and where it is not
    finite."""
    z_loss: float | None = None
    """Mean z-loss of the newest step, nats per token; None where the job has none, and before the first step."""
    load: ExpertLoad | None = None
    """How the newest step's tokens spread over experts; None without these, before the first step, and where
    the loss was not finite."""
    auxiliary_loss: float | None = None
    """Mean auxiliary loss of the newest step, nats per token; None where the job has none, and as above."""
    start_validation_loss: float | None = None
    """Validation loss before the phase's first step, nats per token; None until it is measured."""
    validation_loss: float | None = None
    """Newest validation loss of this phase, nats per token."""
    validation_losses: dict[str, float] = field(default_factory=dict)
    """The newest validation losses by the names of their sets, nats per token; a text is one set without a name. They
    are in no manifest."""
    bits_per_byte: dict[str, float] = field(default_factory=dict)
    """The same in bits per byte of text, where the tokenizer is known."""
    counted: Counts | None = None
    """What the documents of the newest step count; None: tokens attend in whole sequences."""
    ending: Ending = field(default_factory=Ending)
    measurement: Measurement | None = None
    updates: Updates = field(default_factory=lambda: Updates(others=0, blocks=0))
    skipped: Skipped = field(default_factory=Skipped)
    consumed: dict[str, int] | None = None
    """Samples consumed of each source, from the job's start, as the newest manifest has them. None: it is text."""
    blocks: dict[str, BlockOrder] | None = None
    """The order of each source whose windows are shuffled by blocks. None: there is none."""
    mixture_begin: int | None = None
    """Cursor at which the mixture of the phase began. None: it begins now, or the corpus is text."""
    parent: str | None = None
    """Name of the newest checkpoint, which may still be on its way to the disk."""

    # What follows was settled when the phase, or the job, began.
    begin: int = 0
    """Step at which the phase began."""
    optimizer_state: OptimizerState | None = None
    """What the delink that began the phase did to the moments of blocks. None: the first phase."""
    imported: dict[str, Any] | None = None
    """config.json of the weights that the job began with. None: they were random."""

    @classmethod
    def saved_in(cls, manifest: Manifest) -> "Progress":
        return cls(
            step=manifest.step,
            cursor=manifest.global_cursor,
            tokens=manifest.tokens,
            loss=manifest.loss,
            start_validation_loss=manifest.start_validation_loss,
            validation_loss=manifest.validation_loss,
            ending=manifest.ending,
            measurement=manifest.measurement,
            updates=manifest.updates,
            skipped=manifest.skipped,
            consumed=manifest.consumed,
            blocks=manifest.random.blocks,
            mixture_begin=manifest.mixture_begin,
            parent=manifest.name,
            begin=manifest.phase_begin,
            optimizer_state=manifest.optimizer_state,
            imported=manifest.imported,
        )

    def advance(
        self, agreed: Agreement, config: PhaseConfig, left_out: Sequence[str], counted: Counts | None = None
    ) -> None:
        """Takes in one more step. `left_out`: names of the units that it did not update. `counted`: what its documents
        count; None: tokens attend in whole sequences.

        Raises TrainingError where training must not go on, as spec.optimizer.nonFinite says.
        """
        self.step += 1
        self.counted = counted
        loss = loss_of(agreed, config, counted)
        self.skipped = _skipped(self, agreed, loss, skips=config.optimizer.non_finite == "Skip")
        self.cursor += config.batch.sequences
        self.tokens = self.cursor * config.model.sequence_length
        if isfinite(loss):
            self.loss = loss
        is_known = config.optimizer.clipping.mode == "Global" and isfinite(agreed.norm)
        self.gradient_norm = agreed.norm if is_known else None
        self.z_loss = None if agreed.z_loss_sum is None else agreed.z_loss_sum / targets_of(config, counted)
        self.load = agreed.load
        self.auxiliary_loss = _auxiliary_loss(agreed, config)
        if agreed.trains:
            self.updates = self.updates.and_one(left_out, has_experts=config.model.experts is not None)

    def manifest(self, config: PhaseConfig, corpus: CorpusIdentity, *, complete: bool = False) -> Manifest:
        """The manifest of a checkpoint of this moment, without its tensors and files. `complete`: it ends the phase."""
        return Manifest(
            job=config.job,
            execution=config.execution,
            phase=config.phase,
            phase_index=config.index,
            model=config.model,
            sharing=config.sharing,
            random=Random(
                seed=config.data.seed,
                mixture="earliest-deadline-v1" if config.mixtures else None,
                blocks=self.blocks,
            ),
            corpus=corpus,
            step=self.step,
            phase_begin=self.begin,
            tokens=self.tokens,
            global_cursor=self.cursor,
            consumed=self.consumed,
            mixture_begin=self.mixture_begin,
            loss=self.loss,
            start_validation_loss=self.start_validation_loss,
            validation_loss=self.validation_loss,
            phase_complete=complete,
            ending=self.ending,
            measurement=self.measurement,
            delinked=False,
            parent=self.parent,
            optimizer_state=self.optimizer_state,
            imported=self.imported,
            updates=self.updates,
            skipped=self.skipped,
        )


def loss_of(agreed: Agreement, config: PhaseConfig, counted: Counts | None) -> float:
    """The training loss of a step, nats per target of the whole batch."""
    return agreed.loss_sum / targets_of(config, counted)


def _auxiliary_loss(agreed: Agreement, config: PhaseConfig) -> float | None:
    top_k = config.model.top_k
    if agreed.load is None or top_k is None or not (float(top_k.auxiliary_loss) or float(top_k.router_z_loss)):
        return None
    return agreed.load.auxiliary_loss_sum / tokens_of(config)


def tokens_of(config: PhaseConfig) -> int:
    """Tokens of a step's batch: what its auxiliary losses, which are of whole sequences, are the mean of."""
    return config.batch.sequences * config.model.sequence_length


def targets_of(config: PhaseConfig, counted: Counts | None) -> int:
    """Targets of a step's batch: what its loss is the mean of. At least 1, as a batch may consist of empty
    documents."""
    return tokens_of(config) if counted is None else max(1, counted.targets)


def _skipped(progress: Progress, agreed: Agreement, loss: float, *, skips: bool) -> Skipped:
    """The count of skipped steps after the step that `progress` has just made, some of whose losses or gradients may
    not be finite."""
    if not skips and not agreed.trains:
        raise TrainingError(f"{_described(agreed, loss, progress.step)}; {REMEDY}")
    before = progress.skipped
    if not agreed.left_out:
        return Skipped(steps=before.steps, in_a_row=0)
    in_a_row = before.in_a_row + 1
    if in_a_row >= MOST_IN_A_ROW:
        raise TrainingError(
            f"updates of {in_a_row} steps in a row were left out, as losses or gradients were not finite:"
            f" {_described(agreed, loss, progress.step)}; {REMEDY}"
        )
    return Skipped(steps=before.steps + 1, in_a_row=in_a_row)


def _described(agreed: Agreement, loss: float, step: int) -> str:
    for what, value in (("loss", loss), ("gradient norm", agreed.norm)):
        if not isfinite(value):
            return f"the {what} of step {step} is {value}"
    return f"gradients of step {step} are not finite"
