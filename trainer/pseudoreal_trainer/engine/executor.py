"""Interpreter of step plans: executes the records of this rank's plan in order. Main thread only."""

from typing import assert_never

import torch
from torch import Tensor

from pseudoreal_trainer.engine.activation_offload import ActivationOffload
from pseudoreal_trainer.engine.blueprint import Blueprint
from pseudoreal_trainer.engine.copies import Copies
from pseudoreal_trainer.engine.expert_parallel import ExpertParallelPasses
from pseudoreal_trainer.engine.gradients import Agreement, Gradients, ReductionThread, UpdateThread
from pseudoreal_trainer.engine.passes import Passes, PlanRun, TokenBuffer
from pseudoreal_trainer.engine.ranks.all_to_all import ExpertExchanges
from pseudoreal_trainer.engine.ranks.context import PartExchange, TensorExchange
from pseudoreal_trainer.engine.ranks.messages import Messages
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.streams import RunAheadLimit, Streams
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.router_statistics import NO_ROUTER_STATISTICS
from pseudoreal_trainer.engine.state.store import UnitStore
from pseudoreal_trainer.engine.warm_up import WarmUp
from pseudoreal_trainer.model.experts import RouterStatistics
from pseudoreal_trainer.model.float8 import linear_of
from pseudoreal_trainer.model.head import logit_soft_cap
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.model.modules import Modules
from pseudoreal_trainer.plan.memory.activations import max_offloaded_activations
from pseudoreal_trainer.plan.memory.pinned_arena import needs_tokens
from pseudoreal_trainer.plan.records import (
    Agree,
    Backward,
    Count,
    Drop,
    Exchange,
    ExpertBackward,
    ExpertForward,
    Fetch,
    Forward,
    Measure,
    Pass,
    RankPlan,
    Read,
    Receive,
    Recompute,
    Record,
    Reduce,
    Route,
    Send,
    Speculate,
    Stash,
    SumChoices,
    Unstash,
    Update,
)

_AHEAD = 2
"""Number of passes that the main thread may launch ahead of the GPU: enough that the GPU never waits for the thread."""


class StepExecutor:
    """Executes plans on one rank: hands each record to its component (working copies, passes, messages, gradients).

    All ranks execute their plans of a step at the same time.
    """

    def __init__(
        self, blueprint: Blueprint, store: UnitStore, groups: ProcessGroups, streams: Streams, trace: Trace
    ) -> None:
        self._blueprint, self._groups, self._layout = blueprint, groups, groups.layout
        self._streams, self._trace = streams, trace
        linear = linear_of(blueprint.products, groups.device, blueprint.compute)
        modules = Modules(
            blueprint.model,
            store.units,
            blueprint.compute,
            compiled=blueprint.compiled,
            linear=linear,
            tensor_ranks=TensorExchange(groups, trace) if groups.layout.tensor_ranks > 1 else None,
        )
        has_slice = modules.vocabulary_ranks is not None
        assert has_slice == self._layout.slices_vocabulary, "the layout has the model's vocabulary"
        self.modules = modules
        self._copies = Copies(store, groups, streams, trace)
        self._gradients = Gradients(store, modules, groups, streams, trace)
        self._reductions = ReductionThread(blueprint.optimizer, store, groups, streams, trace, blueprint.model.top_k)
        self.updates = UpdateThread(blueprint.optimizer, store, self._reductions, groups, streams, trace)
        self._messages = Messages(groups, blueprint.compute, trace)
        self._offload = ActivationOffload(streams, trace, store.memory, groups.device)
        self._tokens = TokenBuffer(streams, groups.device, store.memory)
        self._passes = Passes(
            layout=groups.layout,
            modules=modules,
            copies=self._copies,
            gradients=self._gradients,
            messages=self._messages,
            offload=self._offload,
            tokens=self._tokens,
            streams=streams,
            trace=trace,
            loss=Loss(
                dtype=blueprint.master,
                chunk=groups.layout.loss_chunk,
                soft_cap=logit_soft_cap(blueprint.model),
                z_factor=float(blueprint.optimizer.z_loss),
                tensor_ranks=modules.vocabulary_ranks,
            ),
            context=PartExchange(groups.context, "context", groups, trace),
            coordinate=groups.sequence_coordinate,
            end_of_document=blueprint.end_of_document,
        )
        self._expert_passes = ExpertParallelPasses(self._passes, ExpertExchanges(groups, trace))
        self._warm_up = WarmUp(self._passes)
        if streams.are_real and groups.layout.pipeline > 1:
            self.updates.warm_up()

    def train(self, plan: RankPlan, run: PlanRun, step: int) -> Agreement:
        """Execute a training plan and return the step's agreement. Updates may still be in progress."""
        self._reductions.begin_step(step)
        self.execute(plan, run)
        assert run.agreement is not None, "every training plan contains Agree"
        agreed = run.agreement
        if not self._agree_is_final:
            agreed = self._reductions.request_final_agreement(self._router_statistics(run))
        heartbeat = self._groups.ranks.heartbeat
        return heartbeat.join(agreed, heartbeat.reductions)

    def execute(self, plan: RankPlan, run: PlanRun) -> None:
        """Execute the records of a plan in order."""
        is_limited = self._layout.stash or self._layout.pipeline > 1
        limit = RunAheadLimit(self._streams, _AHEAD if is_limited else None)
        self._prepare(plan, run)
        self._expert_passes.begin()
        for record in plan:
            self._execute(record, run)
            if isinstance(record, Pass):
                # Updates may have finished during the pass. Start the fetches that waited for these updates, before a
                # record needs the weights.
                self._copies.start_ready()
                limit.pass_launched()
        self._offload.finish()
        self._messages.finish()

    def _execute(self, record: Record, run: PlanRun) -> None:
        match record:
            case Read():
                self._copies.read(record)
            case Fetch():
                self._copies.fetch(record)
            case Drop():
                self._copies.drop(record)
            case Forward():
                (self._expert_passes if self._layout.spreads(record.position) else self._passes).forward(run, record)
            case Backward():
                run.choice_counts.finish(record.position, self._groups, self._trace)
                (self._expert_passes if self._layout.spreads(record.position) else self._passes).backward(run, record)
            case Route() | Count() | Exchange() | ExpertForward() | Recompute() | ExpertBackward():
                self._expert_passes.execute(run, record)
            case SumChoices():
                run.choice_counts.begin_sum(record, self._groups, self._trace)
            case Send():
                self._messages.send(record, run.tensors_of(record.flow).pop((record.position, record.micro_batch)))
            case Receive():
                # Activations and their gradients are [B, T, H].
                shape = self._passes.shape(run, record.micro_batch)
                self._messages.receive(record, (*shape, self._blueprint.model.hidden_size))
            case Stash():
                self._offload.stash(record, run.inputs.pop((record.position, record.micro_batch)))
            case Unstash():
                self._offload.unstash(record)
            case Measure():
                self._measure(record, run)
            case Reduce():
                # Pending fetches use the same group: every rank launches them before this sum, so that all ranks launch
                # their collectives in plan order.
                self._copies.start_all()
                after = self.updates.before_next_gradient
                pending = self._gradients.launch_reduction(record.unit)
                run.reduced[record.unit] = self._reductions.await_reduction(record, pending, after)
            case Speculate():
                self.updates.speculate(record, run.training_step.rate, run.reduced[record.unit])
            case Agree():
                stop, finish = run.training_step.stop, run.training_step.finish
                statistics = self._router_statistics(run) if self._agree_is_final else NO_ROUTER_STATISTICS
                run.agreement = self._reductions.request_agreement(
                    record, run.loss_sums(), statistics, stop=stop, finish=finish
                )
            case Update():
                self.updates.update(record, run.training_step.rate)
            case _:
                assert_never(record)

    def _measure(self, record: Measure, run: PlanRun) -> None:
        assert run.probe is not None, "only measuring plans contain Measure"
        # Pending fetches use the same group: every rank launches them before this sum, so that all ranks launch their
        # collectives in plan order.
        self._copies.start_all()
        with self._trace.gpu_span("measure", record, self._streams):
            run.probe.measure(record.position)

    def _prepare(self, plan: RankPlan, run: PlanRun) -> None:
        """Warm up passes of new shapes, if a pipeline runs on GPUs. Then allocate the host memory for this batch,
        unless it is allocated already.

        Runs before the first message is awaited: warming up and pinning memory may wait for all kernels.
        """
        if self._streams.are_real and self._layout.pipeline > 1:
            self._warm_up.run(run, plan)
        stashes = self._layout.stash and run.training is not None
        masks = self._blueprint.end_of_document is not None
        takes = self._streams.are_real and needs_tokens(self._layout, self._groups.pipeline_rank, masks_documents=masks)
        if not (takes or stashes):
            return
        micro_batches = {record.micro_batch for record in plan if isinstance(record, Forward)}
        if takes:
            self._tokens.prepare([run.batch.shape(m) for m in micro_batches])
        if stashes:
            shapes = [self._passes.shape(run, m) for m in micro_batches]
            numel = max(sequences * length for sequences, length in shapes) * self._blueprint.model.hidden_size
            self._offload.prepare(max_offloaded_activations(plan), numel, self._blueprint.compute)

    def _router_statistics(self, run: PlanRun) -> Tensor:
        """Return the router statistics of this rank's passes, [layers with experts, experts + RouterStatistics.OTHERS].

        Rows of other ranks' layers are zero. The tensor is empty if the model has no experts.
        """
        model = self._blueprint.model
        if model.experts is None:
            return NO_ROUTER_STATISTICS
        none = torch.zeros(
            model.experts.count + RouterStatistics.OTHERS, dtype=torch.float64, device=self._groups.device
        )
        layers = [layer for layer in range(model.layers) if model.has_experts(layer)]
        return torch.stack([run.router_statistics.get(layer + 1, none) for layer in layers])

    @property
    def _agree_is_final(self) -> bool:
        """True if all values of the agreement are known when Agree is executed.

        With global clipping, Agree follows all passes. Otherwise Agree comes between passes, before the expert load and
        the skipped units are known; `ReductionThread.request_final_agreement` then agrees on these values.
        """
        counts, skips = self._blueprint.model.experts is not None, self._blueprint.optimizer.non_finite == "Skip"
        return self._layout.clipping == "Global" or not (counts or skips)

    def close(self) -> None:
        self._reductions.close()
        self.updates.close()
        # The threads have ended, so no copy uses this memory any more.
        self._offload.close()
        self._tokens.close()
