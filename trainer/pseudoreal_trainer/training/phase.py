"""Trains one phase, from its newest checkpoint to its end or until it is asked to stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import Outcome, TerminationMessage

from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.lineage import remember_lineage
from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION, Ending, Manifest, Random
from pseudoreal_trainer.checkpoint.store import CheckpointStore, store_of
from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.stream import Stream
from pseudoreal_trainer.engine.build import Blueprint
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.probe import LayerGradients, Probe
from pseudoreal_trainer.engine.ranks.grid import open_grid
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.reductions import REMEDY
from pseudoreal_trainer.engine.state.compiler import require_compiler
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.forecast.memory.evaluation import sequences_at_once
from pseudoreal_trainer.forecast.memory.from_config import phase_layout, phase_sizes
from pseudoreal_trainer.forecast.memory.sizes import Device
from pseudoreal_trainer.model.compute import compute_dtype, master_dtype
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.sharing import blocks_of_layers
from pseudoreal_trainer.plan.units import units_of
from pseudoreal_trainer.pod.pod_folder import PodFolder
from pseudoreal_trainer.training.ending import Rules
from pseudoreal_trainer.training.events import log_check, log_corpus, log_finished, log_sample, log_saved, log_started
from pseudoreal_trainer.training.metrics import Meter, Reporter
from pseudoreal_trainer.training.not_finite import counted
from pseudoreal_trainer.training.same_corpus import agree_on_corpus, check_corpus
from pseudoreal_trainer.training.saving import Saved, Saver
from pseudoreal_trainer.training.state import Start, fill, find_start, first_manifest
from pseudoreal_trainer.training.step import Stepper, StepResult
from pseudoreal_trainer.training.validation import Validation, build_validation

log = structlog.get_logger()


def train_phase(
    config: PhaseConfig, corpus: Corpus, ranks: Ranks, stop: Callable[[], bool], pod: PodFolder | None = None
) -> TerminationMessage:
    """Every rank calls this. `pod`: whose supervisor hears of it. Raises TrainingError."""
    if _compiles(config, ranks):
        require_compiler()
    store = store_of(config)
    fence = Fence(store.work_directory, config.attempt)
    if ranks.is_first:
        fence.claim()
        remember_lineage(config)
    ranks.heartbeat.working("compares the corpus of all ranks")
    agree_on_corpus(corpus.identity, ranks)
    ranks.heartbeat.working("verifies checkpoints")
    start = find_start(config, ranks)
    own = start.checkpoint.manifest if start and start.own else None
    if own is not None and own.phase_complete:
        log.info("phase_already_complete", phase=config.phase, checkpoint=own.name)
        return termination("Succeeded", config, own, store)
    if start is not None:
        check_corpus(corpus.identity, start.checkpoint.manifest, own=start.own)
    ranks.heartbeat.working("makes the engine")
    device: Device = "cuda" if ranks.device.type == "cuda" else "cpu"
    layout = phase_layout(config, device)
    with open_engine(config, layout, ranks) as engine:
        ranks.heartbeat.working("loads weights")
        fill(engine, config, start.checkpoint if start else None)
        with Saver(engine, store, fence, config.checkpoint, own) as saver:
            validation, meter = _validation(config, corpus, layout, device), Meter(ranks.heartbeat)
            phase = _Phase(config, corpus, ranks, store, engine, saver, validation, meter, Rules(config), pod)
            return phase.run(start, stop)


@contextmanager
def open_engine(config: PhaseConfig, layout: Layout, ranks: Ranks) -> Iterator[Engine]:
    """Every rank calls this. Raises TrainingError when the state does not fit where its home is."""
    blueprint = Blueprint(
        model=config.model,
        optimizer=config.optimizer,
        units=units_of(config.model, config.sharing.blocks),
        master=master_dtype(config.precision),
        compute=compute_dtype(config.precision),
        compiled=_compiles(config, ranks),
        offload_directory=Path(config.offload_directory),
    )
    folder = None if config.trace_directory is None else Path(config.trace_directory) / config.phase
    trace = Trace(ranks.rank, folder)
    engine = Engine(blueprint, open_grid(layout, ranks), trace)
    try:
        yield engine
    except BaseException:
        # Of several ranks one that fails ends without the others, which its side thread may be waiting for.
        if ranks.world == 1:
            engine.close()
        raise
    else:
        engine.close()
    finally:
        trace.close()


def _compiles(config: PhaseConfig, ranks: Ranks) -> bool:
    return config.compile and ranks.device.type == "cuda"


def termination(
    outcome: Outcome, config: PhaseConfig, manifest: Manifest, store: CheckpointStore
) -> TerminationMessage:
    return TerminationMessage(
        outcome=outcome,
        phase=config.phase,
        attempt=config.attempt,
        step=manifest.step,
        tokens=manifest.tokens,
        loss=manifest.loss,
        start_validation_loss=manifest.start_validation_loss,
        validation_loss=manifest.validation_loss,
        checkpoint=manifest.name,
        digest=store.digest(manifest),
        message="" if outcome == "Succeeded" else f"asked to stop; saved checkpoint {manifest.name}",
    )


def _validation(config: PhaseConfig, corpus: Corpus, layout: Layout, device: Device) -> Validation:
    at_once = sequences_at_once(layout, phase_sizes(config, device))
    return build_validation(corpus, config.model.sequence, config.data.validation.sequences, at_once)


@dataclass(frozen=True)
class _Phase:
    config: PhaseConfig
    corpus: Corpus
    ranks: Ranks
    store: CheckpointStore
    engine: Engine
    saver: Saver
    validation: Validation
    meter: Meter
    rules: Rules
    pod: PodFolder | None

    def run(self, start: Start | None, stop: Callable[[], bool]) -> TerminationMessage:
        first = start.checkpoint.manifest.step if start else 0
        reporter = Reporter(self.config, self.meter, first, self.pod) if self.ranks.is_first else None
        try:
            state = self._begin(start)
            if start and not start.own and not self.rules.is_over(state):
                # From here on the job needs that of the one that it continues no more.
                state = self._save(state, reporter)
            state, stopped = self._train(state, reporter, stop)
            return self._end(state, reporter, stopped)
        finally:
            if reporter:
                reporter.close()

    def _begin(self, start: Start | None) -> Manifest:
        if self.ranks.is_first and self.config.index == 0 and start is None:
            log_corpus(self.config, self.corpus, self.validation)
        state = self._adopted(start)
        self.ranks.heartbeat.step_done(state.step)
        if state.start_validation_loss is None:
            loss = self._validated()
            state = state.model_copy(update={"start_validation_loss": loss, "validation_loss": loss})
            state = self.rules.after_loss(state)
        if self.ranks.is_first:
            log_started(self.config, self.engine, state)
        return state

    def _adopted(self, start: Start | None) -> Manifest:
        """The resumed state as this attempt's own."""
        if start is None:
            return first_manifest(self.config, self.corpus.identity)
        resumed = start.checkpoint.manifest
        is_last = self.config.phase_steps == self.config.total_steps
        # What was another job's becomes this one's.
        update = {
            "job": self.config.job,
            "attempt": self.config.attempt,
            "phase_index": self.config.index,
            "format_version": FORMAT_VERSION,
            # The order of the samples goes on as it began, whatever release that was.
            "random": Random(generator=resumed.random.generator, seed=self.config.data.seed),
            "corpus": self.corpus.identity,
            "phase_complete": False,
            # The last phase of another job may be trained longer; an earlier one is done.
            "ending": Ending() if is_last and not start.own else resumed.ending,
            "delinked": False,
            "parent": resumed.name,
        }
        return resumed.model_copy(update=update)

    def _train(self, state: Manifest, reporter: Reporter | None, stop: Callable[[], bool]) -> tuple[Manifest, bool]:
        """The state at the end, and whether training was cut short there."""
        stepper = self._stepper(state)
        first = state.step + 1
        while not self.rules.is_over(state):
            finish, probe = self.pod is not None and self.pod.is_asked_to_finish(), self._probe(state)
            with self.meter, self.ranks.heartbeat.step():
                result = stepper.take(state.step + 1, state.global_cursor, stop=stop(), finish=finish, probe=probe)
            before, state = state, self._advanced(state, result)
            if result.gradients is not None and result.gradients.are_finite:
                state = self._learned(before, state, result.gradients, reporter)
            if result.finish:
                state = self.rules.after_request(state)
            self._report(self.saver.poll(), reporter)
            validated = self._validation_due(state)
            if validated:
                state = state.model_copy(update={"validation_loss": self._validated()})
                state = self.rules.after_loss(state)
            over = self.rules.is_over(state)
            if reporter:
                reporter.step(state, validated=validated, important=over or result.stop or state.step == first)
            if result.stop and not over:
                return state, True
            if state.step % self.config.checkpoint.every_steps == 0 and not over:
                state = self._save(state, reporter)
        return state, False

    def _stepper(self, state: Manifest) -> Stepper:
        stream = Stream(self.corpus.train, self.config.model.sequence, state.random.seed, state.random.generator)
        return Stepper(self.config, stream, self.engine, state.phase_begin)

    def _advanced(self, state: Manifest, result: StepResult) -> Manifest:
        step, cursor = state.step + 1, state.global_cursor + self.config.batch.sequences
        skipped = counted(state, result, step, skips=self.config.optimizer.non_finite == "Skip")
        left_out = [self.engine.units[unit].name for unit in result.left_out]
        if left_out and self.ranks.is_first:
            log.warning("updates_left_out", step=step, loss=result.loss, norm=result.norm, units=left_out)
        update = {
            "step": step,
            "global_cursor": cursor,
            "tokens": cursor * self.config.model.sequence,
            "loss": result.loss if isfinite(result.loss) else state.loss,
            "updates": state.updates.and_one(left_out) if result.trains else state.updates,
            "skipped": skipped,
        }
        return state.model_copy(update=update)

    def _probe(self, state: Manifest) -> Probe | None:
        """Of the next step."""
        measure = self.config.measure
        if measure is not None and self.rules.measures(state):
            return self.engine.probe(blocks_of_layers(measure.next_sharing, self.config.model.layers))
        return self.engine.probe(None) if self.rules.checks(state) else None

    def _learned(self, before: Manifest, state: Manifest, found: LayerGradients, reporter: Reporter | None) -> Manifest:
        """The state after a step that was measured."""
        if self.rules.measures(before):
            state = self.rules.after_measuring(state, found)
        if self.rules.checks(before):
            state = self.rules.after_check(state, found.correlations)
            if reporter:
                log_check(state, found)
                reporter.checked(found)
        return state

    def _validation_due(self, state: Manifest) -> bool:
        return state.step % self.config.data.validation.every_steps == 0 or self.rules.is_over(state)

    def _validated(self) -> float:
        self.ranks.heartbeat.working("validates")
        loss = self.validation.measure(self.engine)
        if not isfinite(loss):
            raise TrainingError(f"the validation loss is {loss}; {REMEDY}")
        return loss

    def _end(self, state: Manifest, reporter: Reporter | None, stopped: bool) -> TerminationMessage:
        state = self._save(state.model_copy(update={"phase_complete": not stopped}), reporter)
        # Also those that do not write end only when it is committed.
        self._report(self.saver.finish(), reporter)
        if self.ranks.is_first and not stopped:
            log_sample(self.config, self.corpus, self.store)
            log_finished(self.config, state, self.meter.seconds)
        return termination("Yielded" if stopped else "Succeeded", self.config, state, self.store)

    def _save(self, state: Manifest, reporter: Reporter | None) -> Manifest:
        """Begins to save; the result is the state whose parent is that checkpoint."""
        self._report(self.saver.start(state), reporter)
        if self.config.checkpoint.mode == "sync":
            self._report(self.saver.finish(), reporter)
        return state.model_copy(update={"parent": state.name})

    def _report(self, committed: list[Saved], reporter: Reporter | None) -> None:
        for saved in committed:
            if reporter:
                log_saved(saved)
                reporter.saved(saved.manifest, saved.cost)
