"""Log events of a phase, for people and for log parsers."""

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.layers import sets_of
from pseudoreal_api.wire.messages import Sample

from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradient_similarity import LayerGradients
from pseudoreal_trainer.engine.gradients import Agreement
from pseudoreal_trainer.model import float8
from pseudoreal_trainer.model.attention import varlen_obstacle
from pseudoreal_trainer.model.sampling import readable
from pseudoreal_trainer.training.progress import Progress, loss_of
from pseudoreal_trainer.training.saving import Saved
from pseudoreal_trainer.training.validation import Validation

log = structlog.get_logger()


def log_corpus(corpus: Corpus | TokenCorpus, validations: Mapping[str, Validation], order2_nats: float | None) -> None:
    """Log the corpus. `order2_nats`: the baseline of a text, in nats per token; None for token files."""
    measured = sum(validation.tokens for validation in validations.values())
    if isinstance(corpus, TokenCorpus):
        log.info(
            "token_corpus",
            tokens=corpus.tokens,
            sources={name: source.reader.tokens for name, source in corpus.sources.items()},
            measured_tokens=measured,
            sha256=corpus.identity.sha256,
        )
        _warn_about_packed_rows(corpus)
        return
    log.info(
        "corpus",
        bytes=corpus.bytes,
        train_tokens=len(corpus.train),
        validation_tokens=len(corpus.validation),
        measured_tokens=measured,
        sha256=corpus.identity.sha256,
        order2_nats=order2_nats,
    )


def _warn_about_packed_rows(corpus: TokenCorpus) -> None:
    if corpus.packed and corpus.end_of_document is None:
        log.warning(
            "packed_without_masks",
            files=list(corpus.packed),
            why="rows hold documents that have nothing in common, filled up with empty ones: without masks tokens"
            " attend to all of them, and the model learns that an end follows an end; set"
            " spec.data.documents.masking to IntraDocument, or prepare the files without --pack",
        )


def log_started(config: PhaseConfig, engine: Engine, progress: Progress) -> None:
    layout = engine.groups.layout
    log.info(
        "phase_started",
        phase=config.phase,
        step=progress.step,
        phase_steps=config.phase_steps,
        total_steps=config.total_steps,
        layers=config.model.layers,
        blocks=len(set(layout.layer_blocks)),
        sets_of_experts=len(sets_of(layout.layer_experts)),
        parameters=sum(unit.numel for unit in engine.blueprint.units),
        ranks=engine.groups.ranks.world,
        pipeline=layout.pipeline,
        schedule=layout.order,
        state_sharding=layout.sharding,
        replicas=layout.replicas,
        homes=dict(Counter(layout.home(unit) for unit in range(layout.units))),
        window=layout.window,
        state_bytes=engine.state.memory_report().state,
        device=str(engine.groups.device),
        compute=config.precision.compute,
        document_attention=_document_attention(engine),
        float8_products=_float8_products(engine),
        resumed_from=progress.parent,
        start_validation_loss=progress.start_validation_loss,
    )


def _document_attention(engine: Engine) -> str | None:
    """Return how attention within documents is computed, and why; None if documents are not masked."""
    blueprint = engine.blueprint
    if blueprint.end_of_document is None:
        return None
    if engine.groups.layout.context_ranks > 1 or engine.groups.layout.sequence_chunks > 1:
        return "one call per document and chunk"
    model = blueprint.model
    width = model.head_size
    heads, key_heads = model.query_size // width, model.key_size // width
    obstacle = varlen_obstacle(engine.groups.device, blueprint.compute, heads, key_heads, width)
    return "one call per micro-batch" if obstacle is None else f"one call per document: {obstacle}"


def _float8_products(engine: Engine) -> str | None:
    """Return how products in float8 are computed, and why; None without such products."""
    products = engine.blueprint.products
    if products == "Compute":
        return None
    obstacle = float8.obstacle(products, engine.groups.device, engine.blueprint.compute)
    return (
        "by the device, if their sizes allow it"
        if obstacle is None
        else f"of rounded numbers in the compute dtype: {obstacle}"
    )


def log_check(progress: Progress, found: LayerGradients) -> None:
    rounded = [round(correlation, 4) for correlation in found.correlations]
    log.info("gradients_compared", step=progress.step, correlations=rounded, checks_met=progress.ending.checks)


def log_left_out(config: PhaseConfig, progress: Progress, agreed: Agreement, units: Sequence[str]) -> None:
    """Log the names of the units without an update in the newest step."""
    loss = loss_of(agreed, config, progress.counted)
    log.warning("updates_left_out", step=progress.step, loss=loss, norm=agreed.norm, units=units)


def log_saved(saved: Saved) -> None:
    manifest = saved.manifest
    log.info(
        "checkpoint_saved",
        checkpoint=manifest.name,
        complete=manifest.phase_complete,
        **saved.cost.model_dump(),
    )


def log_sample(config: PhaseConfig, sample: Sample) -> None:
    """Log the text generated after the phase."""
    log.info("sample", phase=config.phase, prompt=readable(sample.prompt), text=readable(sample.text))


def log_samples(step: int, samples: Sequence[Sample]) -> None:
    """Log the texts generated at a validation."""
    log.info("samples", step=step, texts=[readable(sample.prompt + sample.text) for sample in samples])


def log_finished(config: PhaseConfig, manifest: Manifest, seconds: float) -> None:
    log.info(
        "phase_finished",
        phase=config.phase,
        step=manifest.step,
        tokens=manifest.tokens,
        loss=manifest.loss,
        start_validation_loss=manifest.start_validation_loss,
        validation_loss=manifest.validation_loss,
        seconds=seconds,
        checkpoint=manifest.name,
    )
