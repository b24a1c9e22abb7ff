"""Progress of a phase, and its form in a checkpoint: the manifest."""

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
from pseudoreal_trainer.engine.gradients import REMEDY, Agreement
from pseudoreal_trainer.engine.router_statistics import ExpertLoad
from pseudoreal_trainer.errors import TrainingError

MOST_IN_A_ROW = 10
"""Number of consecutive skipped steps at which the training fails. A single bad batch passes; a diverged training does
not recover."""


@dataclass
class Progress:
    """Progress of a phase. Equal on all ranks after the same step, so that ranks can make the same decisions from it.

    Changed only by `open_data_source`, before the first step, and by the training loop.
    """

    step: int = 0
    """Number of steps done since the start of the job."""
    cursor: int = 0
    """Number of samples consumed since the start of the job."""
    tokens: int = 0
    """Number of tokens trained since the start of the job."""
    loss: float | None = None
    """Training loss of the newest step with a finite loss, in nats per token."""
    gradient_norm: float | None = None
    """L2 norm of the newest step's gradient before clipping; None if clipping is not global, or the norm is not
    finite."""
    z_loss: float | None = None
    """Mean z-loss of the newest step, in nats per token; None if the job has no z-loss, and before the first step."""
    load: ExpertLoad | None = None
    """Distribution of the newest step's tokens over experts; None without experts, before the first step, and if the
    loss was not finite."""
    auxiliary_loss: float | None = None
    """Mean auxiliary loss of the newest step, in nats per token; None if the job has no auxiliary loss, and whenever
    `load` is None."""
    start_validation_loss: float | None = None
    """Validation loss before the phase's first step, in nats per token; None until it is measured."""
    validation_loss: float | None = None
    """Newest validation loss of this phase, in nats per token; None until it is measured."""
    validation_losses: dict[str, float] = field(default_factory=dict)
    """Name of a validation set -> newest loss in nats per token. A text is one set with an empty name. Manifests do not
    contain these losses."""
    bits_per_byte: dict[str, float] = field(default_factory=dict)
    """Name of a validation set -> newest loss in bits per byte of text; only sets with a known tokenizer."""
    counted: Counts | None = None
    """Target and attention-pair counts over the documents of the newest step; None if attention spans whole
    sequences."""
    ending: Ending = field(default_factory=Ending)
    measurement: Measurement | None = None
    updates: Updates = field(default_factory=lambda: Updates(others=0, blocks=0))
    skipped: Skipped = field(default_factory=Skipped)
    consumed: dict[str, int] | None = None
    """Source name -> number of samples consumed since the start of the job, as of the newest manifest; None if the
    corpus is text."""
    blocks: dict[str, BlockOrder] | None = None
    """Source name -> order of the source's blocks. Only sources with windows shuffled by blocks; None without such a
    source."""
    mixture_begin: int | None = None
    """Cursor at the start of the phase's mixture; None before the start is recorded, and if the corpus is text."""
    parent: str | None = None
    """Name of the newest checkpoint; its commit may be pending."""

    # The fields below are fixed at the start of the phase or the job.
    begin: int = 0
    """Number of steps done before the phase."""
    optimizer_state: OptimizerState | None = None
    """Treatment of the blocks' moments by the delink before this phase; None in the first phase."""
    imported: dict[str, Any] | None = None
    """config.json of the imported initial weights; None if the weights were random."""

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
        """Add one step. `left_out`: names of the units without an update.

        `counted`: document counts of the step; None: attention spans whole sequences. Raises TrainingError if a
        non-finite loss or gradient must end the training.
        """
        self.step += 1
        self.counted = counted
        loss = loss_of(agreed, config, counted)
        self.skipped = _count_skipped(self, agreed, loss, skips=config.optimizer.non_finite == "Skip")
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
        """Return the manifest of a checkpoint of this step, without tensors and files. `complete`: the checkpoint ends
        the phase."""
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
    """Return the training loss of a step, in nats per target of the whole batch."""
    return agreed.loss_sum / targets_of(config, counted)


def _auxiliary_loss(agreed: Agreement, config: PhaseConfig) -> float | None:
    top_k = config.model.top_k
    if agreed.load is None or top_k is None or not (float(top_k.auxiliary_loss) or float(top_k.router_z_loss)):
        return None
    return agreed.load.auxiliary_loss_sum / tokens_of(config)


def tokens_of(config: PhaseConfig) -> int:
    """Return the number of tokens of a step's batch: the denominator of the mean auxiliary losses. Auxiliary losses
    cover whole sequences."""
    return config.batch.sequences * config.model.sequence_length


def targets_of(config: PhaseConfig, counted: Counts | None) -> int:
    """Return the number of targets of a step's batch: the denominator of the mean loss.

    The result is at least 1, because a batch may consist of empty documents.
    """
    return tokens_of(config) if counted is None else max(1, counted.targets)


def _count_skipped(progress: Progress, agreed: Agreement, loss: float, *, skips: bool) -> Skipped:
    """Return the count of skipped steps after the step just added to `progress`.

    Raises TrainingError if a non-finite loss or gradient must end the training: at once, or after `MOST_IN_A_ROW`
    skipped steps in a row.
    """
    if not skips and not agreed.trains:
        raise TrainingError(f"{_describe(agreed, loss, progress.step)}; {REMEDY}")
    before = progress.skipped
    if not agreed.skipped:
        return Skipped(steps=before.steps, in_a_row=0)
    in_a_row = before.in_a_row + 1
    if in_a_row >= MOST_IN_A_ROW:
        raise TrainingError(
            f"updates of {in_a_row} steps in a row were left out, as losses or gradients were not finite:"
            f" {_describe(agreed, loss, progress.step)}; {REMEDY}"
        )
    return Skipped(steps=before.steps + 1, in_a_row=in_a_row)


def _describe(agreed: Agreement, loss: float, step: int) -> str:
    for what, value in (("loss", loss), ("gradient norm", agreed.norm)):
        if not isfinite(value):
            return f"the {what} of step {step} is {value}"
    return f"gradients of step {step} are not finite"
