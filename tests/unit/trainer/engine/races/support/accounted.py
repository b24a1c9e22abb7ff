"""Account of every wait in the engine: what shows that it is needed, or why the detector cannot show it."""

from tests.unit.trainer.engine.races.support.sites import Site

_OFFLOAD, _COPIES, _GRADIENTS = "engine/activation_offload.py", "engine/copies.py", "engine/gradients.py"

FOUND: dict[Site, str] = {
    Site(_OFFLOAD, "ActivationOffload.stash", "self._streams.wait_event(computed)"): "offloaded activations, 1F1B",
    Site(_OFFLOAD, "ActivationOffload.stash", "self._streams.wait_event(read)"): (
        "an input is overwritten while it is reloaded"
    ),
    Site(_OFFLOAD, "ActivationOffload.unstash", "self._streams.wait_event(free)"): "offloaded activations, 1F1B",
    Site(_OFFLOAD, "ActivationOffload.unstash", "self._streams.wait_event(stashed.done)"): (
        "offloaded activations, 1F1B"
    ),
    Site(_OFFLOAD, "ActivationOffload.take_reloaded", "self._streams.wait_event(returning.done)"): (
        "offloaded activations, 1F1B"
    ),
    Site(_OFFLOAD, "ActivationOffload._release_oldest", "synchronize(moving.done)"): "offloaded activations",
    Site(_COPIES, "PendingAllGather.launch_second", "self._first.wait()"): "replicas of shards",
    Site(_COPIES, "PendingAllGather.wait", "self._last.wait()"): "shards on the host",
    Site(_COPIES, "Copies._finish_fetch", "self._streams.wait_event(copy.event)"): "host",
    Site(_COPIES, "Copies._finish_resident", "self._streams.wait_event(self._wait_for_update(unit))"): "device",
    Site(_COPIES, "Copies._start_fetch", "self._streams.wait_event(slot.free)"): "host",
    Site(_COPIES, "Copies._start_fetch", "self._streams.wait_event(updated)"): "shards on the device",
    Site(_COPIES, "Copies._start_fetch", "self._streams.wait_event(self._dropped)"): (
        "a fetch after a drop of the other pool"
    ),
    Site(_COPIES, "Copies._refresh", "self._streams.wait_event(self._wait_for_update(unit))"): "sharded gradients",
    Site("engine/gradient_similarity.py", "NeighbourCosines.wait_for_sends", "work.wait()"): "probe over stages",
    Site(_GRADIENTS, "Gradients.launch_reduction", "self._streams.wait_event(accumulated)"): "sharded gradients",
    Site(_GRADIENTS, "ReductionThread._finish_reduction", "synchronize(self._streams.record_event())"): "host",
    Site(
        _GRADIENTS, "ReductionThread._finish_reduction", "self._streams.wait_event(reduced)"
    ): "balancing biases, not clipped",
    Site(_GRADIENTS, "ReductionThread._finish_sum", "synchronize(pending.accumulated)"): "host",
    Site(_GRADIENTS, "ReductionThread._finish_sum", "self._streams.wait_event(pending.replicated)"): "slices of layers",
    Site(_GRADIENTS, "ReductionThread._finish_sum", "pending.work.wait()"): "sharded gradients",
    Site(_GRADIENTS, "ReductionThread._agree", "synchronize(computed)"): "host",
    Site(_GRADIENTS, "ReductionThread._agree_finally", "synchronize(computed)"): "prototypes",
    Site(_GRADIENTS, "sums_of", "work.wait()"): "sharded gradients",
    Site(
        "engine/passes.py", "TokenBuffer.prepare", "synchronize(self._copied)"
    ): "tokens are replaced while they are copied",
    Site("engine/ranks/all_to_all.py", "ExpertExchanges.take", "exchange.work.wait()"): "experts over ranks",
    Site("engine/ranks/messages.py", "Messages.take", "incoming.work.wait()"): "pipeline",
    Site("engine/ranks/messages.py", "Messages.finish", "work.wait()"): "pipeline",
    Site("engine/ranks/messages.py", "Messages._forget_answered", "answered[0].wait()"): "pipeline",
    Site("engine/ranks/process_groups.py", "_connect_channels", "work.wait()"): "pipeline",
    Site("engine/router_statistics.py", "ChoiceCounts.finish", "work.wait()"): "balanced by step",
    Site("engine/state/disk.py", "Staging.take", "synchronize(free)"): "disk",
    Site("accelerator/adapter.py", "Adapter.unpin", "torch.accelerator.synchronize(self.device)"): (
        "memory is freed while it is copied"
    ),
    Site(
        "engine/state/snapshot.py", "Snapshot._copy_unit", "self._streams.wait_event(source.updated.result())"
    ): "device",
    Site("engine/state/snapshot.py", "Snapshot._copy", "synchronize(self._streams.record_event())"): "device",
    Site("engine/state/store.py", "NewestUpdates.wait", "synchronize(update.result())"): "state is set",
}
"""Wait -> scenario in which something is found if the wait is removed."""

OTHERS: dict[Site, str] = {
    Site("engine/ranks/streams.py", "RunAheadLimit.pass_launched", "synchronize(self._passes.popleft())"): (
        "bounds memory: the thread is at most two passes ahead of the device, so few messages and activations are alive"
    ),
    Site(_GRADIENTS, "ReductionThread._finish_sum", "synchronize(self._streams.record_event())"): (
        "orders nothing: later operations are on the same stream. The thread waits here for the other ranks, where the"
        " heartbeat counts the time as a wait for them"
    ),
    Site("engine/ranks/trace.py", "Trace.gpu_span", "synchronize(zero)"): (
        "orders nothing: takes the time of the host at which the device executes the reference event"
    ),
    Site("engine/warm_up.py", "WarmUp.run", "torch.accelerator.synchronize(passes.streams.device)"): (
        "orders nothing: kernels of the warm-up end before the first message, because loading a kernel may wait for all"
        " others"
    ),
    Site(_COPIES, "Copies._wait_for_gather", "gather.wait()"): "calls PendingAllGather.wait, whose wait is found",
    Site("engine/engine_state.py", "EngineState.wait_for_updates", "self._store.updates.wait()"): (
        "calls NewestUpdates.wait, whose wait is found"
    ),
    Site("engine/ranks/ranks.py", "check_devices", "store.wait(['all ranks'], limit or default_pg_timeout)"): (
        "waits for the other processes before there is a device or a group"
    ),
    Site("engine/state/disk.py", "DiskState.update", "wait(reads.values())"): (
        "waits for threads whose results were taken, unless one of them has failed"
    ),
    Site("engine/state/disk.py", "DiskState.update", "wait(writes.values())"): (
        "waits for threads whose results were taken, unless one of them has failed"
    ),
    Site("engine/state/memory.py", "AdamW._in_pieces", "wait(done)"): (
        "waits for threads whose results are taken next, so that none computes when one has failed"
    ),
    Site("engine/state/memory.py", "_pool.enter", "started.wait()"): "a barrier of threads that touch no memory yet",
    Site("engine/state/memory.py", "_pool", "started.wait()"): "a barrier of threads that touch no memory yet",
}
"""Wait whose removal is no race -> the reason why it is there."""
