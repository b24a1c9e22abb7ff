"""Transition between two phases without copying: a delink splits shared blocks into blocks that fewer layers share, a
growth adds layers that begin as others. The new checkpoint is a manifest that maps each block to bytes of an older
checkpoint."""

from dataclasses import dataclass

import structlog
from pseudoreal_api.resolved.config import DelinkConfig
from pseudoreal_api.resolved.layers import Sources, number_of_blocks
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Growth, OptimizerState, Sharing
from pseudoreal_api.wire.messages import TerminationMessage

from pseudoreal_trainer.checkpoint.fence import Fence
from pseudoreal_trainer.checkpoint.manifest import Ending, Head, Link, Manifest, Updates
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint, store_of
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.plan.units import are_experts, block_name, block_of, experts_name, is_router

log = structlog.get_logger()


def delink(config: DelinkConfig) -> TerminationMessage:
    """Commit the first checkpoint of `config.phase`. If this checkpoint already exists and is intact, commit nothing.

    Raises TrainingError if the phase before has no complete checkpoint, or the newest of them is corrupt.
    """
    store = store_of(config)
    source = store.newest(config.from_phase, complete=True)
    if source is None:
        raise TrainingError(
            f"phase {config.from_phase} has no complete checkpoint in {store.folder}; it must finish before"
            f" {config.phase} can be delinked from it"
        )
    target = Target(config.to_sharing, config.to_model, config.growth)
    manifest = delinked(source.manifest, config.phase, target, config.optimizer_state)
    phase = manifest.phase_index if config.index is None else config.index
    Fence(store.work_directory, config.execution, phase=phase).claim()
    manifest = manifest.revised(execution=config.execution)
    manifest = _find_verified(store, manifest) or _commit(store, manifest)
    assert manifest.link is not None, "`delinked` always sets a link"
    owned = {"blocks": len(manifest.link.blocks), "sets_of_experts": len(manifest.link.experts)}
    before, after = source.manifest.model, manifest.model
    if before == after:
        log.info("delinked", checkpoint=manifest.name, parent=manifest.parent, **owned)
    else:
        pattern = config.growth.pattern if config.growth else None
        log.info("grown", checkpoint=manifest.name, parent=manifest.parent, layers_before=before.layers,
                 layers=after.layers, pattern=pattern, experts_before=_experts(before), experts=_experts(after),
                 **owned)  # fmt: skip
    return TerminationMessage(
        outcome="Succeeded",
        phase=config.phase,
        execution=config.execution,
        step=manifest.step,
        tokens=manifest.tokens,
        loss=manifest.loss,
        checkpoint=manifest.name,
        digest=store.digest(manifest),
    )


def _experts(model: Model) -> int:
    """Return the number of experts of a layer; 0 without experts."""
    return model.experts.count if model.experts else 0


@dataclass(frozen=True)
class Target:
    """Layers and sharing of the next phase."""

    sharing: Sharing
    model: Model | None = None
    """None: the model of the source."""
    growth: Growth | None = None
    """How the layers of `model` begin; None: `model` is None."""


def delinked(source: Manifest, phase: str, target: Target, optimizer_state: OptimizerState) -> Manifest:
    """Return the manifest of the same weights with the layers and blocks of the next phase. Pure.

    Raises ValueError if the new sharing does not refine the old sharing, TrainingError if the source lacks something
    that is needed.
    """
    change = _Change.of(source, target)
    if change.expert_copies > 1:
        _check_rows(source)
    if change.is_none:
        optimizer_state = "Copy"
    elif change.is_growth and optimizer_state == "Measured":
        optimizer_state = "Scale"  # gradients of layers that do not exist yet cannot be measured
    link = _link(source, change, _Divisors.of(source, target.sharing, change, optimizer_state))
    return source.revised(
        phase=phase,
        phase_index=source.phase_index + 1,
        phase_begin=source.step,
        model=target.model or source.model,
        sharing=target.sharing,
        start_validation_loss=None,
        validation_loss=None,
        phase_complete=False,
        ending=Ending(),
        measurement=None,
        delinked=True,
        parent=source.name,
        optimizer_state=optimizer_state,
        updates=_updates(source.updates, change, reset=optimizer_state == "Reset"),
        link=link,
    )


@dataclass(frozen=True)
class _Change:
    """Change of the layers, and of the sharing of blocks and expert sets, from this phase to the next."""

    sources: Sources
    block_uses: float
    """Number of layers that use a block of this phase, divided by the number that use a block of the next phase."""
    expert_uses: float
    """The same ratio for expert sets, times `expert_copies`; 1 without experts."""
    expert_copies: float
    """Number of experts of a set in the next phase, divided by the number in this phase; 1 without experts."""
    is_growth: bool
    """True if the next phase has more layers or experts."""

    @classmethod
    def of(cls, source: Manifest, target: Target) -> "_Change":
        """Return the change from the phase of `source` to `target`. Raises ValueError if the new sharing does not
        refine the old sharing."""
        before, after = source.model, target.model or source.model
        sources = Sources.of(target.growth, (before, source.sharing), (after, target.sharing))
        blocks, sets = number_of_blocks(source.sharing, before.layers), len({*sources.experts.values()})
        copies = after.experts.count / before.experts.count if before.experts and after.experts else 1
        layers = before.layers_with_experts * len(sources.experts)
        return cls(
            sources=sources,
            block_uses=before.layers * len(sources.blocks) / (blocks * after.layers),
            expert_uses=copies * layers / (sets * after.layers_with_experts) if sets else 1,
            expert_copies=copies,
            is_growth=after.layers > before.layers or copies > 1,
        )

    @property
    def is_none(self) -> bool:
        return self.block_uses == self.expert_uses == 1 and not self.is_growth

    def divides(self, unit: str) -> bool:
        """Return True if the uses of the unit change, or its layers are copied."""
        return self.is_growth or (self.expert_uses if are_experts(unit) else self.block_uses) != 1


@dataclass(frozen=True)
class _Divisors:
    """Divisors of the stored moments. A pair holds the divisors of first and second moments; 0 sets moments to zero."""

    blocks: tuple[float, float]
    routers: tuple[float, float]
    experts: tuple[float, float]
    measured: dict[str, list[float]]
    """Name of a tensor in the source -> measured divisors of its second moments: one, or one per expert of a stacked
    tensor."""

    @classmethod
    def of(cls, source: Manifest, sharing: Sharing, change: _Change, optimizer_state: OptimizerState) -> "_Divisors":
        """Return the divisors.

        The gradient of a shared block is the sum over the n layers that used it; a layer's own block gets one of the n
        terms. First moments are therefore divided by n, and second moments, which average squares, by n². The same
        holds for experts; where n copies of an expert share its tokens, each of them, and each of their rows of the
        router, gets a part of the gradient. Where more layers use a block than before, n is less than 1.
        """
        uses = (change.block_uses, change.block_uses * change.expert_copies, change.expert_uses)
        blocks, routers, experts = ((n, n**2) for n in uses)
        match optimizer_state:
            case "Copy":
                return cls((1, 1), (1, 1), (1, 1), {})
            case "Reset":
                # Units of the same layers as before keep their moments.
                blocks, experts = (
                    (0.0, 0.0) if change.divides(unit) else (1.0, 1.0) for unit in (block_name(0), experts_name(0))
                )
                return cls(blocks, blocks, experts, {})
            case "Scale":
                return cls(blocks, routers, experts, {})
            case "Measured":
                return cls(blocks, routers, experts, _measured_divisors(source, sharing, blocks[1], experts[1]))

    def second_of(self, name: str) -> float:
        """Return the divisor of a tensor's second moments, without regard to measured divisors."""
        return (self.experts if are_experts(name) else self.routers if is_router(name) else self.blocks)[1]


def _measured_divisors(source: Manifest, sharing: Sharing, blocks: float, experts: float) -> dict[str, list[float]]:
    """Return name of a tensor -> divisors of its second moments: measured square of the shared tensor's gradient,
    divided by the measured square for the next phase. `blocks`, `experts`: divisors for tensors of blocks and of
    experts if the measured square for the next phase is zero."""
    if source.updates.blocks == 0:
        return {}
    found = source.measurement
    if found is None or found.next_sharing != sharing:
        measured = "nothing" if found is None else f"the gradients of {_describe(found.next_sharing)}"
        raise TrainingError(
            f"optimizerState Measured: checkpoint {source.name} measured {measured}, and not the gradients of"
            f" {_describe(sharing)}; train the end of phase {source.phase} with optimizerState Measured, or delink"
            " with Scale"
        )
    return {
        name: [
            shared / one if one > 0 else experts if are_experts(name) else blocks
            for shared, one in zip(found.shared[name], single, strict=True)
        ]
        for name, single in found.single.items()
    }


def _check_rows(source: Manifest) -> None:
    """Raise TrainingError if the files of a linked checkpoint have a number of experts that does not divide that of its
    model: then experts that begin as those of the model are not experts of the files modulo their number."""
    rows = next((tensor.shape[0] for name, tensor in source.tensors.items() if is_router(name)), 1)
    if _experts(source.model) % rows:
        raise TrainingError(
            f"checkpoint {source.name} has {_experts(source.model)} experts, read from {rows} of {source.data_folder},"
            f" and more experts cannot begin as those; train phase {source.phase} for a step at least"
        )


def _describe(sharing: Sharing) -> str:
    return f"{sharing.blocks} {'sets of experts' if sharing.shares_experts_alone else 'blocks'} ({sharing.pattern})"


def _link(source: Manifest, change: _Change, divisors: _Divisors) -> Link:
    assert source.link is None or not divisors.measured, "a measured checkpoint was saved by training, without a link"
    old = source.link or Link(
        folder=source.name,
        blocks=list(range(number_of_blocks(source.sharing, source.model.layers))),
        first_moment_divisor=1,
        second_moment_divisor=1,
    )
    (first, second), (routers_first, routers_second) = divisors.blocks, divisors.routers
    experts_first, experts_second = divisors.experts
    return Link(
        folder=old.folder,
        blocks=[old.blocks[source] for _, source in sorted(change.sources.blocks.items())],
        first_moment_divisor=old.first_moment_divisor * first,
        second_moment_divisor=old.second_moment_divisor * second,
        experts={number: old.source(experts_name(source)) for number, source in change.sources.experts.items()},
        experts_first_moment_divisor=old.divisor_of(_ANY_EXPERTS, "first_moment") * experts_first,
        experts_second_moment_divisor=old.divisor_of(_ANY_EXPERTS, "second_moment") * experts_second,
        routers_first_moment_divisor=old.divisor_of(_ANY_ROUTER, "first_moment") * routers_first,
        routers_second_moment_divisor=old.divisor_of(_ANY_ROUTER, "second_moment") * routers_second,
        zero_outputs=sorted(_zero_outputs(old, change.sources)),
        second_moment_divisors=divisors.measured
        or {
            name: [divisor * divisors.second_of(name) for divisor in before]
            for name, before in old.second_moment_divisors.items()
        },
    )


def _zero_outputs(old: Link, sources: Sources) -> set[str]:
    """Return the names of the units whose outputs are zero: of those that are added, and of those whose sources are."""
    blocks = {number for number, source in sources.blocks.items() if block_name(source) in old.zero_outputs}
    experts = {number for number, source in sources.experts.items() if experts_name(source) in old.zero_outputs}
    return {
        *map(block_name, sources.zero_blocks | blocks),
        *map(experts_name, sources.zero_experts | experts),
    }


_ANY_EXPERTS, _ANY_ROUTER = experts_name(0), f"{block_name(0)}.router.weight"


def _updates(source: Updates, change: _Change, *, reset: bool) -> Updates:
    """Return the step counts at the start of the next phase. Units with moments reset to zero start at count 0."""
    left_out = {unit: count for unit, count in source.left_out.items() if block_of(unit) is None}
    origins = {
        **{block_name(new): block_name(old) for new, old in change.sources.blocks.items()},
        **{experts_name(new): experts_name(old) for new, old in change.sources.experts.items()},
    }
    done = {unit: 0 if reset and change.divides(unit) else source.of(old) for unit, old in origins.items()}
    blocks = source.blocks if any(done.values()) else 0
    counts = {unit: blocks - count for unit, count in done.items()}
    # Experts without an entry would have the count of their block.
    left_out |= {unit: n for unit, n in counts.items() if n or counts[unit.removesuffix(".experts")]}
    return Updates(others=source.others, blocks=blocks, left_out=left_out)


def _commit(store: CheckpointStore, manifest: Manifest) -> Manifest:
    store.begin(manifest)
    store.commit(manifest)
    return manifest


def _find_verified(store: CheckpointStore, target: Manifest) -> Manifest | None:
    for head in store.committed(target.phase):
        if head.name == target.name:
            return _verify(store, head)
    return None


def _verify(store: CheckpointStore, head: Head) -> Manifest | None:
    try:
        manifest = store.whole(head)
        store.verify(manifest)
    except CorruptCheckpoint as error:
        log.warning("checkpoint_corrupt", checkpoint=head.name, error=str(error))
        return None
    return manifest
