"""Log events of a phase, for people and for programs that parse the log."""

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.layers import sets_of
from pseudoreal_api.wire.messages import Sample

from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.baseline import order2_nats
from pseudoreal_trainer.data.corpus import Corpus
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.probe import LayerGradients
from pseudoreal_trainer.engine.updates import Agreement
from pseudoreal_trainer.model.sampling import Sampling, generate, readable
from pseudoreal_trainer.model.transformer import Transformer
from pseudoreal_trainer.training.progress import Progress, loss_of
from pseudoreal_trainer.training.saving import Saved
from pseudoreal_trainer.training.start import load_weights
from pseudoreal_trainer.training.validation import Validation, with_context

SAMPLE_TOKENS = 300
_PROMPT_TOKENS = 64
_SAMPLED_BYTES = 256 << 20
"""Bytes of the largest checkpoint from which `log_sample` draws a sample."""

log = structlog.get_logger()


def log_corpus(config: PhaseConfig, corpus: Corpus | TokenCorpus, validations: Mapping[str, Validation]) -> None:
    measured = sum(validation.tokens for validation in validations.values())
    if isinstance(corpus, TokenCorpus):
        log.info(
            "token_corpus",
            tokens=corpus.tokens,
            sources={name: source.reader.tokens for name, source in corpus.sources.items()},
            measured_tokens=measured,
            sha256=corpus.identity.sha256,
        )
        _warn_of_packed(corpus)
        return
    windows = with_context(corpus, config.model.sequence_length, config.data.validation.sequences)
    log.info(
        "corpus",
        bytes=corpus.bytes,
        train_tokens=len(corpus.train),
        validation_tokens=len(corpus.validation),
        measured_tokens=measured,
        sha256=corpus.identity.sha256,
        order2_nats=order2_nats(corpus.train, windows),
    )


def _warn_of_packed(corpus: TokenCorpus) -> None:
    if corpus.packed and corpus.end_of_document is None:
        log.warning(
            "packed_without_masks",
            files=list(corpus.packed),
            why="rows hold documents that have nothing in common, filled up with empty ones: without masks tokens"
            " attend to all of them, and the model learns that an end follows an end; set"
            " spec.data.documents.masking to IntraDocument, or prepare the files without --pack",
        )


def log_started(config: PhaseConfig, engine: Engine, progress: Progress) -> None:
    layout = engine.mesh.layout
    log.info(
        "phase_started",
        phase=config.phase,
        step=progress.step,
        phase_steps=config.phase_steps,
        total_steps=config.total_steps,
        layers=config.model.layers,
        blocks=len(set(layout.layer_blocks)),
        sets_of_experts=len(sets_of(layout.layer_experts)),
        parameters=sum(unit.numel for unit in engine.whole_units),
        ranks=engine.mesh.ranks.world,
        pipeline=layout.pipeline,
        schedule=layout.order,
        state_sharding=layout.sharding,
        replicas=layout.replicas,
        homes=dict(Counter(layout.home(unit) for unit in range(layout.units))),
        window=layout.window,
        state_bytes=dict(engine.state_bytes()),
        device=str(engine.mesh.device),
        compute=config.precision.compute,
        resumed_from=progress.parent,
        start_validation_loss=progress.start_validation_loss,
    )


def log_check(progress: Progress, found: LayerGradients) -> None:
    rounded = [round(correlation, 4) for correlation in found.correlations]
    log.info("gradients_compared", step=progress.step, correlations=rounded, checks_met=progress.ending.checks)


def log_left_out(config: PhaseConfig, progress: Progress, agreed: Agreement, units: Sequence[str]) -> None:
    """Log the units that the newest step did not update, by their names."""
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


def log_sample(config: PhaseConfig, corpus: Corpus | TokenCorpus, store: CheckpointStore) -> None:
    """Log a text that the trained model generates.

    Large models are skipped, because this rank may lack the memory for all their weights. Token files without a known
    tokenizer are skipped too.
    """
    manifest = store.whole(store.committed(config.phase)[-1])
    tokenizer = corpus.tokenizer if isinstance(corpus, TokenCorpus) else ByteTokenizer()
    if tokenizer is None or manifest.bytes > _SAMPLED_BYTES:
        return
    model = Transformer(config.model, config.sharing)
    load_weights(model, store.reader(manifest))
    prompt = _prompt(corpus)
    sampling = Sampling(tokenizer.vocabulary, seed=config.data.seed)
    written = generate(model, prompt, SAMPLE_TOKENS, config.model.sequence_length, sampling)
    texts = {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(written)}
    log.info("sample", phase=config.phase, **{name: readable(text) for name, text in texts.items()})


def log_samples(step: int, samples: Sequence[Sample]) -> None:
    """Log the texts that the model generated at a validation."""
    log.info("samples", step=step, texts=[readable(sample.prompt + sample.text) for sample in samples])


def _prompt(corpus: Corpus | TokenCorpus) -> list[int]:
    """Return the first tokens of the validation text."""
    text = next(iter(corpus.sets.values()))[0] if isinstance(corpus, TokenCorpus) else corpus.validation
    prompt: list[int] = text[:_PROMPT_TOKENS].tolist()
    return prompt


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
