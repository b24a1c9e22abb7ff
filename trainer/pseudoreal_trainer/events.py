"""The events of a phase in the log, for people and for the programs that read it."""

import structlog
from pseudoreal_api.resolved import PhaseConfig

from pseudoreal_trainer.corpus import Corpus
from pseudoreal_trainer.manifest import Manifest
from pseudoreal_trainer.model import Transformer
from pseudoreal_trainer.ranks import Ranks
from pseudoreal_trainer.sampling import generate, readable
from pseudoreal_trainer.validation import Validation, baseline_nats

SAMPLE_BYTES = 300
_PROMPT_BYTES = 64

log = structlog.get_logger()


def log_ignored(config: PhaseConfig) -> None:
    """Warns of what the spec asks for and this engine does not do. The losses do not depend on it."""
    layout, offload = config.parallelism, config.offload
    if layout.pipeline != 1:
        log.warning("ignored", field="parallelism.pipeline", value=layout.pipeline, instead="a rank has all layers")
    if layout.state_sharding != "none":
        log.warning("ignored", field="parallelism.stateSharding", value=layout.state_sharding, instead="none")
    if (offload.weights, offload.optimizer) != ("device", "device"):
        log.warning("ignored", field="offload", value=offload.to_dict(), instead="all state stays on the device")


def log_corpus(config: PhaseConfig, corpus: Corpus, validation: Validation) -> None:
    nats = baseline_nats(corpus, config.model.sequence, config.data.validation.sequences)
    log.info(
        "corpus",
        bytes=corpus.bytes,
        train_tokens=len(corpus.train),
        validation_tokens=len(corpus.validation),
        measured_tokens=validation.tokens,
        order2_nats=nats,
    )


def log_started(config: PhaseConfig, ranks: Ranks, model: Transformer, state: Manifest) -> None:
    log.info(
        "phase_started",
        phase=config.phase,
        step=state.step,
        phase_steps=config.phase_steps,
        total_steps=config.total_steps,
        layers=config.model.layers,
        blocks=config.sharing.blocks,
        parameters=sum(p.numel() for p in model.parameters()),
        ranks=ranks.world,
        device=str(ranks.device),
        compute=config.precision.compute,
        resumed_from=state.parent,
        start_validation_loss=state.start_validation_loss,
    )


def log_sample(config: PhaseConfig, corpus: Corpus, model: Transformer) -> None:
    prompt = corpus.validation[:_PROMPT_BYTES].tobytes()
    text = generate(model, prompt, SAMPLE_BYTES, config.model.sequence, config.data.seed)
    log.info("sample", phase=config.phase, prompt=readable(prompt), text=readable(text))


def log_finished(config: PhaseConfig, state: Manifest, seconds: float) -> None:
    log.info(
        "phase_finished",
        phase=config.phase,
        step=state.step,
        tokens=state.tokens,
        loss=state.loss,
        start_validation_loss=state.start_validation_loss,
        validation_loss=state.validation_loss,
        seconds=seconds,
        checkpoint=state.name,
    )
