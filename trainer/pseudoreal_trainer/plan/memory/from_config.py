"""From a phase's configuration to the inputs of its plan. Pure."""

from pseudoreal_api.quantity import bytes_of
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers

from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.memory.homes import (
    Peaks,
    activation_peaks,
    budget_bounds,
    budget_violations,
    choose_homes,
    homes_from_spec,
)
from pseudoreal_trainer.plan.parts import own_units, sliced_units
from pseudoreal_trainer.plan.sizes import Device, Sizes, compute_bytes, logit_bytes, loss_chunk_limit, master_bytes
from pseudoreal_trainer.plan.units import units_of


def phase_layout(config: PhaseConfig, device: Device, device_memory: int | None = None) -> Layout:
    """Return the layout of a phase, the same on all ranks. `device_memory`: bytes of the memory of the smallest of all
    ranks' devices; None: not known. Raises InvalidJobError if the phase exceeds its budget."""
    sizes = phase_sizes(config, device, device_memory=device_memory)
    peaks = activation_peaks(fixed_layout(config, sizes), sizes)
    layout = placed_layout(config, sizes, peaks)
    reasons = budget_violations(layout, sizes, peaks, budget_bounds(config.offload.budget))
    if reasons:
        raise InvalidJobError("; ".join(reasons))
    return layout


def placed_layout(config: PhaseConfig, sizes: Sizes, peaks: Peaks) -> Layout:
    """Return the layout with homes chosen for the budget, even if the budget is still exceeded. `peaks`: activation
    peaks of the layout before the budget moves any unit."""
    layout = fixed_layout(config, sizes)
    return layout.with_homes(choose_homes(config.offload, layout, sizes, peaks))


def fixed_layout(config: PhaseConfig, sizes: Sizes) -> Layout:
    """Return the layout before the budget moves any unit: each unit has the home that the phase names."""
    assert config.parallelism.layout == "Given", "layout Auto is resolved before the ranks start"
    most_logits = logit_bytes(sizes.device, sizes.device_memory)
    return Layout(
        layer_blocks=blocks_of_layers(config.sharing, config.model.layers),
        layer_experts=experts_of_layers(config.sharing, config.model),
        pipeline=config.parallelism.pipeline,
        data=config.ranks // config.parallelism.pipeline,
        micro_batches=config.batch.micro_batches,
        replicas=config.parallelism.replicas,
        expert_ranks=config.parallelism.expert_ranks,
        context_ranks=config.parallelism.context_ranks,
        tensor_ranks=config.parallelism.tensor_ranks,
        expert_groups=config.offload.expert_groups,
        homes=homes_from_spec(config.offload, sizes),
        order=config.parallelism.schedule,
        sharding=config.parallelism.state_sharding,
        window=config.offload.window,
        keep=config.activations.keep,
        sequence_chunks=config.activations.sequence_chunks,
        stash=config.activations.home == "Host",
        clipping=config.optimizer.clipping.mode,
        speculates=config.optimizer.clipping.updates == "Speculative",
        ends_are_one=config.model.embeddings == "Tied",
        vocabulary=config.model.vocabulary_size,
        loss_chunk=loss_chunk_limit(sizes.vocabulary_rows, sizes.master_bytes, most_logits),
        measures=config.measure is not None or config.until.gradient_correlation is not None,
        balances_steps=config.model.balances_steps,
    )


def phase_sizes(config: PhaseConfig, device: Device, threads: int = 1, device_memory: int | None = None) -> Sizes:
    """Return the sizes of a phase. A budget for the device counts as its memory. `device_memory`: bytes of the device's
    memory; None: not known."""
    budget = budget_bounds(config.offload.budget).device
    whole, spread = units_of(config.model, config.sharing), config.parallelism.expert_ranks
    return Sizes(
        model=config.model,
        units=sliced_units(
            own_units(whole, 0, spread, config.offload.expert_groups), 0, config.parallelism.tensor_ranks
        ),
        compute_bytes=compute_bytes(config.precision.compute),
        master_bytes=master_bytes(config.precision.compute),
        micro_batch=config.batch.sequences // config.batch.micro_batches,
        checkpoint_buffer=bytes_of(config.checkpoint.buffer_bytes),
        device=device,
        device_memory=device_memory if budget is None else budget,
        threads=threads,
        has_z_loss=float(config.optimizer.z_loss) > 0,
        masks_documents=config.data.documents.masking == "IntraDocument",
        moments=config.optimizer.moments,
        gradients=config.precision.gradients,
        products=config.precision.products,
        uses_muon=config.optimizer.algorithm == "Muon",
    )
