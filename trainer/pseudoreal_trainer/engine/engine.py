"""One rank of a phase's training: runs training steps and evaluations, and holds this rank's shards of the units."""

from collections.abc import Sequence
from dataclasses import replace

from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor

from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.engine_state import EngineState
from pseudoreal_trainer.engine.executor import StepExecutor
from pseudoreal_trainer.engine.gradient_similarity import LayerGroup, SimilarityProbe, groups_of
from pseudoreal_trainer.engine.gradients import Agreement
from pseudoreal_trainer.engine.passes import Batch, PlanRun, Training
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.streams import Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.plan.check import check_plan
from pseudoreal_trainer.plan.lower import evaluation_plan, measuring_plan, step_plan
from pseudoreal_trainer.plan.parts import units_of_rank
from pseudoreal_trainer.plan.records import RankPlan, Update


class Engine:
    """One rank's training engine. Every rank creates one and calls the same methods in the same order."""

    def __init__(self, blueprint: Blueprint, groups: ProcessGroups, trace: Trace) -> None:
        """Raises PlanError if the layout's plan is invalid, TrainingError if a home has too little room for the
        state."""
        self.blueprint, self.groups, self._layout, self.trace = blueprint, groups, groups.layout, trace
        self.units = units_of_rank(groups.layout, blueprint.units, groups.ranks.rank)
        """Units as this rank holds them: with expert parallelism, a unit of experts contains only this rank's
        experts."""
        # Checked before any memory is allocated.
        self._plan = self._checked(step_plan(groups.layout))
        self._measuring_plan = self._checked(measuring_plan(groups.layout)) if groups.layout.measures else self._plan
        streams = Streams(groups.device)
        store = UnitStore(
            blueprint.model,
            blueprint.optimizer,
            self.units,
            groups,
            trace,
            master=blueprint.master,
            compute=blueprint.compute,
            moments=blueprint.moments,
            gradients=blueprint.gradients,
            seed=blueprint.seed,
            folder=blueprint.offload_directory,
            enter_thread=streams.enter_thread,
        )
        self._executor = StepExecutor(blueprint, store, groups, streams, trace)
        self.state = EngineState(store, self._executor.updates, groups.layout, streams, trace)

    def train(self, batch: Batch, training: Training, step: int, probe: SimilarityProbe | None = None) -> Agreement:
        """Run one training step, measured by `probe` if given, and return its agreement.

        Returns when all ranks know the loss, the skipped units and the expert load. Updates continue into the next
        call.
        """
        self.trace.begin_step(step)
        run = PlanRun(batch, training, probe=probe)
        return self._executor.train(self._plan if probe is None else self._measuring_plan, run, step)

    def evaluate(self, batch: Batch, micro_batches: int) -> dict[int, float]:
        """Return micro-batch -> cross-entropy summed over its tokens, in nats. Empty on ranks without the head."""
        run = PlanRun(batch, None)
        self._evaluate(run, micro_batches)
        return {m: float(losses.cross_entropy) for m, losses in run.losses.items()}

    def logits(self, batch: Batch, positions: Sequence[int]) -> dict[int, Tensor]:
        """Return micro-batch m -> logits of the token after `positions[m]`, [V], in the dtype of the loss.

        Each micro-batch has one sequence, and there is one micro-batch per position. Empty on ranks without the head.
        """
        run = PlanRun(batch, None, reads=positions)
        self._evaluate(run, len(positions))
        return run.logits

    def _evaluate(self, run: PlanRun, micro_batches: int) -> None:
        layout = replace(self._layout, micro_batches=micro_batches)
        self._executor.execute(evaluation_plan(layout)[self.groups.pipeline_rank], run)

    def new_probe(self, next_sharing: Sharing | None) -> SimilarityProbe:
        """Return a probe for one step. `next_sharing`: sharing of the next phase; None: only the gradients of
        neighbouring layers are compared."""
        model, layer_groups = self.blueprint.model, tuple[LayerGroup, ...]()
        if next_sharing is not None:
            next_blocks = blocks_of_layers(next_sharing, model.layers)
            layer_groups = groups_of(self._layout, next_blocks, experts_of_layers(next_sharing, model))
        modules = self._executor.modules
        return SimilarityProbe(self.groups, self.blueprint.units, modules, self.blueprint.master, layer_groups)

    def order_of_updates(self) -> list[int]:
        """Return the units of this rank in the order in which a step updates them."""
        return [record.unit for record in self._plan if isinstance(record, Update)]

    def close(self) -> None:
        """End the threads, then free the memory that they used."""
        self._executor.close()
        self.state.close()
        self.groups.close()

    def _checked(self, plan: tuple[RankPlan, ...]) -> RankPlan:
        """Check the plan of all pipeline ranks and return this rank's part. Raises PlanError if the plan is invalid."""
        check_plan(self._layout, plan)
        return plan[self.groups.pipeline_rank]
