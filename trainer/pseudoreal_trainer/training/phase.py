"""Training loop of one phase: from its start, or a checkpoint, to its end or a request to stop."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import Outcome, TerminationMessage

from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.lineage import remember_lineage
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.origin import Complete, Continued, FreshStart, Origin, Resumed, find_origin
from pseudoreal_trainer.checkpoint.store import CheckpointStore, store_of
from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.data.stream import rank_parts
from pseudoreal_trainer.data.token_corpus import TokenCorpus, end_of_document_of
from pseudoreal_trainer.data.tokenizer.saved import save_tokenizer
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients, SimilarityProbe
from pseudoreal_trainer.engine.gradients import REMEDY, Agreement
from pseudoreal_trainer.engine.passes import Training
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.runtime.history import record_start
from pseudoreal_trainer.runtime.pod_folder import PodFolder, membership_of_ranks
from pseudoreal_trainer.training import events
from pseudoreal_trainer.training.data_source import DataSource, Samples, StreamBatch, open_data_source
from pseudoreal_trainer.training.metrics import Meter, Reporter, phase_gauges
from pseudoreal_trainer.training.progress import Progress, tokens_of
from pseudoreal_trainer.training.saving import Saved, Saver
from pseudoreal_trainer.training.schedule import EndConditions, phase_rate
from pseudoreal_trainer.training.sinks import check_packages
from pseudoreal_trainer.training.start import (
    agree_on_corpus,
    check_corpus,
    fill,
    first_progress,
    open_engine,
    open_imported,
    require_compiler,
    uses_compiler,
)
from pseudoreal_trainer.training.validation import (
    Prompts,
    Validation,
    order2_baseline,
    phase_prompts,
    phase_validations,
    sample_after_phase,
)

log = structlog.get_logger()


def train_phase(
    config: PhaseConfig,
    corpus: Corpus | TokenCorpus,
    ranks: Ranks,
    stop: Callable[[], bool],
    pod: PodFolder | None = None,
) -> TerminationMessage:
    """Train the phase and return its termination message. Collective: every rank calls this.

    `stop`: returns whether this rank was asked to stop. `pod`: folder of the files through which ranks and the pod's
    supervisor communicate; None without a supervisor. Raises TrainingError.
    """
    if uses_compiler(config, ranks):
        require_compiler()
    check_packages(config)
    store = store_of(config)
    fence = Fence(store.work_directory, config.execution, membership_of_ranks(), config.index)
    if ranks.is_first:
        fence.claim()
        remember_lineage(config)
        save_tokenizer(config)
    ranks.heartbeat.working("compares the corpus of all ranks")
    agree_on_corpus(corpus.identity, ranks)
    ranks.heartbeat.working("verifies checkpoints")
    origin = find_origin(config, store, ranks)
    if isinstance(origin, Complete):
        manifest = origin.checkpoint.manifest
        log.info("phase_already_complete", phase=config.phase, checkpoint=manifest.name)
        return _termination("Succeeded", config, manifest, store)
    check_corpus(corpus.identity, origin)
    imported = open_imported(config, origin, checks=ranks.is_first)
    ranks.heartbeat.working("makes the engine")
    layout = phase_layout(config, kind_of(ranks.device), ranks.least_device_memory())
    failure = ranks.heartbeat.failure
    # Record a failure before the contexts are left: leaving them can take as long as a disk or server hangs.
    with open_engine(config, layout, ranks, end_of_document_of(corpus)) as engine, failure.noticed():
        ranks.heartbeat.working("loads weights")
        fill(engine, config, origin, imported)
        resumed = origin.checkpoint.manifest if isinstance(origin, Resumed) else None
        progress = first_progress(config, origin, imported)
        if ranks.is_first:
            checkpoint = None if isinstance(origin, FreshStart) else origin.checkpoint.manifest.name
            in_place = None if pod is None else pod.in_place()
            record_start(config, progress.step, checkpoint, in_place.restarts if in_place else 0)
        with open_data_source(config, corpus, progress, engine.groups) as data:
            validations = phase_validations(config, corpus, layout, kind_of(ranks.device))
            prompts = phase_prompts(config, corpus, next(iter(validations.values())).at_once)
            meter = Meter(ranks.heartbeat, lambda: data.waited_seconds)
            gauges = phase_gauges(config, ranks)
            reporter = Reporter(config, meter, gauges, progress.step, pod) if ranks.is_first else None
            with (
                reporter or nullcontext(),
                failure.noticed(),
                Saver(engine, store, fence, config.checkpoint, resumed) as saver,
            ):
                loop = _TrainingLoop(
                    config=config,
                    corpus=corpus,
                    data=data,
                    store=store,
                    engine=engine,
                    saver=saver,
                    validations=validations,
                    prompts=prompts,
                    progress=progress,
                    meter=meter,
                    reporter=reporter,
                    pod=pod,
                )
                loop.start(origin)
                stopped = loop.train(stop)
                return loop.finish(stopped=stopped)


def train_step(
    config: PhaseConfig,
    samples: Samples,
    engine: Engine,
    progress: Progress,
    *,
    counted: Counts | None = None,
    stop: bool = False,
    finish: bool = False,
    probe: SimilarityProbe | None = None,
) -> Agreement:
    """Run the step after `progress`, without changing `progress`.

    `counted`: document counts of the step over all ranks; None: attention spans whole sequences. `stop`: whether this
    rank was asked to stop. `finish`: whether this rank was asked to end the phase.

    The loss, the gradients and the update are the same on every rank. Between layouts, these values differ only by the
    order of sums. A NaN or infinite loss or gradient changes no weight. With global clipping, or after a non-finite
    loss, the whole update is skipped; otherwise only the units with non-finite gradients are skipped.
    """
    step, groups = progress.step + 1, engine.groups
    own = rank_parts(config.batch, progress.cursor, groups.sequence_group, groups.layout.mesh.sequence_groups)
    batch = StreamBatch(samples, own)
    rate, tokens = phase_rate(config, step, progress.begin), tokens_of(config)
    ignored = 0 if counted is None else tokens - counted.targets
    return engine.train(batch, Training(tokens, rate, stop, finish, ignored), step, probe)


@dataclass
class _TrainingLoop:
    """Loop over the steps of a phase, with the work before the first step and after the last step. Changes `progress`.

    The methods run collectives, so every rank calls them in the same order. The methods may branch only on values that
    are equal on all ranks: `progress`, the config, and results of an agreement between ranks.
    """

    config: PhaseConfig
    corpus: Corpus | TokenCorpus
    data: DataSource
    store: CheckpointStore
    engine: Engine
    saver: Saver
    validations: Mapping[str, Validation]
    """Name of a validation set -> validation. The loss of the first set is the job's validation loss."""
    prompts: Prompts | None
    """Prompts for samples at validations; None: no samples are generated."""
    progress: Progress
    meter: Meter
    reporter: Reporter | None
    """Reporter of the first rank; None on the other ranks."""
    pod: PodFolder | None

    def start(self, origin: Origin) -> None:
        """Do the work before the first step. Measures the validation loss, unless a checkpoint already has it, and logs
        the start. Saves a checkpoint if the job continues another job."""
        progress = self.progress
        if self.reporter and isinstance(origin, FreshStart):
            baseline = order2_baseline(self.config, self.corpus) if isinstance(self.corpus, Corpus) else None
            events.log_corpus(self.corpus, self.validations, baseline)
        self.engine.groups.ranks.heartbeat.step_done(progress.step)
        if progress.start_validation_loss is None:
            progress.start_validation_loss = progress.validation_loss = self._validate()
            progress.ending = self._conditions.after_loss(progress)
        if self.reporter:
            events.log_started(self.config, self.engine, progress)
        if isinstance(origin, Continued) and not self._conditions.is_over(progress):
            # With a checkpoint of its own, the job no longer needs the checkpoint of the job that it continues.
            self._save()

    def train(self, stop: Callable[[], bool]) -> bool:
        """Train until the phase is over or a rank was asked to stop. Return whether the loop ended because of a request
        to stop."""
        config, conditions, progress = self.config, self._conditions, self.progress
        heartbeat = self.engine.groups.ranks.heartbeat
        samples = self.data.samples
        first = progress.step + 1
        while not conditions.is_over(progress):
            finish = self.pod is not None and self.pod.is_asked_to_finish()
            measures, checks = conditions.measures(progress), conditions.checks(progress)
            probe = self._probe(measures=measures, checks=checks)
            with self.meter, heartbeat.step():
                counted = self.data.count(progress.cursor)
                agreed = train_step(
                    config, samples, self.engine, progress, counted=counted, stop=stop(), finish=finish, probe=probe
                )
                gradients = None if probe is None else probe.result()
            self._advance(agreed, counted)
            if gradients is not None and gradients.are_finite:
                self._record_gradients(gradients, measures=measures, checks=checks)
            if agreed.finish:
                progress.ending = conditions.after_request(progress)
            # Ranks see the end of the save at different steps, so only reports may depend on the result of poll().
            self._report_saved(self.saver.poll())
            validated = progress.step % config.data.validation.every_steps == 0 or conditions.is_over(progress)
            if validated:
                # Validate before the save below: the checkpoint of this step contains the loss, and the `Ending` after
                # this loss.
                progress.validation_loss = self._validate()
                progress.ending = conditions.after_loss(progress)
                self._generate_samples()
            over = conditions.is_over(progress)
            if self.reporter:
                important = over or agreed.stop or progress.step == first
                self.reporter.report_step(progress, validated=validated, important=important)
            if agreed.stop and not over:
                # All ranks agreed on the stop within the step, so all leave the loop here. A phase that is over ends
                # as complete, even if its pod was asked to stop.
                return True
            if progress.step % config.checkpoint.every_steps == 0 and not over:
                self._save()
        return False

    def finish(self, *, stopped: bool) -> TerminationMessage:
        """Save the last checkpoint and wait for its commit; return the phase's termination message."""
        manifest = self._save(complete=not stopped)
        # Ranks without a reporter wait too: no rank may exit before the checkpoint is committed.
        self._report_saved(self.saver.finish())
        if self.reporter and not stopped:
            if (sample := sample_after_phase(self.config, self.corpus, self.store)) is not None:
                events.log_sample(self.config, sample)
            events.log_finished(self.config, manifest, self.meter.seconds)
        return _termination("Yielded" if stopped else "Succeeded", self.config, manifest, self.store)

    @property
    def _conditions(self) -> EndConditions:
        return EndConditions(self.config)

    def _probe(self, *, measures: bool, checks: bool) -> SimilarityProbe | None:
        """Return the gradient probe for the next step; None if neither `measures` nor `checks`."""
        measure = self.config.measure
        if measures and measure is not None:
            return self.engine.new_probe(measure.next_sharing)
        return self.engine.new_probe(None) if checks else None

    def _advance(self, agreed: Agreement, counted: Counts | None) -> None:
        # All groups of one set of experts have the same name; list the name once.
        left_out = [*dict.fromkeys(self.engine.units[unit].name for unit in agreed.skipped)]
        self.progress.advance(agreed, self.config, left_out, counted)
        if left_out and self.reporter:
            events.log_left_out(self.config, self.progress, agreed, left_out)

    def _record_gradients(self, found: LayerGradients, *, measures: bool, checks: bool) -> None:
        """Update the phase's measurement and ending from the layer gradients of the newest step."""
        if measures:
            self.progress.measurement = self._conditions.after_measuring(self.progress, found)
        if checks:
            self.progress.ending = self._conditions.after_check(self.progress, found.correlations)
            if self.reporter:
                events.log_check(self.progress, found)
                self.reporter.record_correlations(found.correlations)

    def _validate(self) -> float:
        """Return the validation loss of the current weights on the first set, in nats per token.

        Stores the losses of all sets in `progress`. Raises TrainingError if a loss is not finite.
        """
        self.engine.groups.ranks.heartbeat.working("validates")
        losses = {name: validation.measure(self.engine) for name, validation in self.validations.items()}
        for name, loss in losses.items():
            if not isfinite(loss):
                raise TrainingError(f"the validation loss{f' of {name}' if name else ''} is {loss}; {REMEDY}")
        self.progress.validation_losses = losses
        bits = {name: validation.bits_per_byte(losses[name]) for name, validation in self.validations.items()}
        self.progress.bits_per_byte = {name: each for name, each in bits.items() if each is not None}
        return next(iter(losses.values()))

    def _generate_samples(self) -> None:
        """Generate and report the continuations of the prompts, if the job has prompts."""
        if self.prompts is None:
            return
        self.engine.groups.ranks.heartbeat.working("writes samples")
        samples = self.prompts.samples(self.engine)
        if self.reporter:
            events.log_samples(self.progress.step, samples)
            self.reporter.record_samples(samples)

    def _save(self, *, complete: bool = False) -> Manifest:
        """Start saving a checkpoint; with `checkpoint.mode: Sync`, also wait for its commit.

        Returns the checkpoint's manifest, still without tensors and files.
        """
        if self.reporter:
            # The metrics go first: an execution that resumes from this checkpoint must find all lines up to its step.
            self.reporter.persist(self.progress.step)
        self.progress.consumed = self.data.consumed(self.progress.cursor)
        manifest = self.progress.manifest(self.config, self.corpus.identity, complete=complete)
        self._report_saved(self.saver.start(manifest))
        if self.config.checkpoint.mode == "Sync":
            self._report_saved(self.saver.finish())
        self.progress.parent = manifest.name
        return manifest

    def _report_saved(self, committed: list[Saved]) -> None:
        for saved in committed:
            if self.reporter:
                events.log_saved(saved)
                self.reporter.record_checkpoint(saved.manifest, saved.cost)


def _termination(
    outcome: Outcome, config: PhaseConfig, manifest: Manifest, store: CheckpointStore
) -> TerminationMessage:
    return TerminationMessage(
        outcome=outcome,
        phase=config.phase,
        execution=config.execution,
        step=manifest.step,
        tokens=manifest.tokens,
        loss=manifest.loss,
        start_validation_loss=manifest.start_validation_loss,
        validation_loss=manifest.validation_loss,
        checkpoint=manifest.name,
        digest=store.digest(manifest),
        message="" if outcome == "Succeeded" else f"asked to stop; saved checkpoint {manifest.name}",
    )
