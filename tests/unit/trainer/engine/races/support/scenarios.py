"""Scenarios in which the engine is checked for races: every home, order, clipping and kind of unit, on one rank and on
several, with and without a device."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from pseudoreal_trainer.engine.activation_offload import ActivationOffload
from pseudoreal_trainer.engine.passes import TokenBuffer
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.engine.state.pinned import Block, PinnedMemory
from pseudoreal_trainer.plan.records import Drop, Fetch, Stash, Unstash

from tests.unit.trainer.engine.races.support.machine import Machine
from tests.unit.trainer.engine.races.support.scenario import Component, Scenario, TrainedCase
from tests.unit.trainer.engine.support import running
from tests.unit.trainer.engine.support.cases import EIGHT_IN_BALANCE, WIDE, Case

_MIXTURE = json.dumps(
    {
        "family": "Mixtral",
        "attention": {"heads": 2},
        "feedForward": {"size": 12},
        "experts": {"type": "TopK", "count": 4, "topK": {"perToken": 2}},
    }
)
_BALANCED_BY_STEP = json.dumps(
    {
        "feedForward": {"size": 12},
        "experts": {
            "type": "TopK",
            "count": 4,
            "topK": {"perToken": 2, "size": 8, "auxiliaryLoss": "0.1", "balanceOver": "Step"},
        },
    }
)
_CUT = json.dumps({"sequenceLength": 8})
"""Sequences with equal chunks for two context ranks."""
_TWO_RATES = (("Attention", "0.5", "2"), ("Norms", "2", "1"))


def _case(**fields: object) -> Case:
    """Return a case with few layers, whose working copies have another dtype than its masters."""
    return Case(**{"precision": "bfloat16", "layers": 2} | fields)  # type: ignore[arg-type]


ONE_RANK = {
    "device": _case(),
    "host": _case(homes="h", clipping="Global"),
    "Muon": _case(homes="dhD", clipping="Global", algorithm="Muon"),
    "one slot": _case(homes="h", window=1, micro_batches=4),
    "kept graphs": _case(homes="h", clipping="PerUnit", keep="All", order="GPipe"),
    "chunks of the sequence": _case(homes="h", clipping="Global", sequence_chunks=2, documents=True),
    "kept products": _case(homes="h", clipping="PerUnit", keep="Products", order="GPipe", activation="SwiGLU"),
    "disk": _case(homes="D", clipping="Global"),
    "disk, one slot": _case(homes="D", window=1, layers=4),
    "all homes, clipped by unit": _case(homes="dhD", clipping="PerUnit", layers=4),
    "all homes, one dtype": _case(homes="dhD", clipping="Global", precision="float32", layers=4),
    "offloaded activations, 1F1B": _case(homes="hd", stash=True, order="1F1B", micro_batches=4),
    "offloaded activations": _case(homes="h", stash=True, micro_batches=4),
    "probe": _case(homes="h", layers=4, blocks=2, clipping="Global", next_sharing=(4, "Cycle")),
    "experts": _case(homes="hD", drawn=_MIXTURE),
    "prototypes": _case(homes="h", experts=6, prototypes=3),
    "idle groups of experts": _case(homes="h", drawn=_MIXTURE, expert_groups=2, clipping="Global", idle="Skip"),
    "groups of experts on disk": _case(homes="D", drawn=_MIXTURE, expert_groups=4),
    "balancing biases": _case(options="in balance", layers=4, clipping="Global"),
    "balancing biases, not clipped": _case(homes="dh", options="in balance", layers=4),
    "documents": _case(homes="h", tied=True, documents=True, loss_chunk=5, z_loss="1e-3"),
    "speculative updates": _case(homes="h", clipping="Global", norm="100", speculates=True, layers=4),
    "rounded moments": _case(homes="dhD", clipping="Global", moments="BFloat16"),
    "moments in blocks": _case(homes="dhD", clipping="Global", moments="Float8", drawn=WIDE),
    "rounded gradients": _case(homes="dhD", clipping="Global", gradients="BFloat16"),
    "rounded gradients, not kept": _case(homes="hD", clipping="PerUnit", gradients="BFloat16", layers=4),
    "several ranges": _case(homes="h", clipping="Global", multipliers=_TWO_RATES),
}
SEVERAL_RANKS = {
    "shards on the host": _case(data=2, sharding="Full", homes="h", clipping="Global"),
    "speculative updates of shards": _case(
        data=2, sharding="Full", homes="hd", clipping="Global", norm="100", speculates=True
    ),
    "shards in all homes": _case(data=2, sharding="Full", homes="dhD", clipping="PerUnit", window=1),
    "shards on the device": _case(data=2, sharding="Full"),
    "sharded gradients": _case(data=2, sharding="Gradients", clipping="Global"),
    "sharded moments": _case(data=2, sharding="Optimizer", clipping="PerUnit"),
    "copies": _case(data=2, homes="dh", clipping="Global"),
    "1F1B": _case(pipeline=2, order="1F1B", micro_batches=4, homes="h", clipping="Global"),
    "pipeline": _case(pipeline=2, clipping="PerUnit", documents=True),
    "pipeline, one micro-batch": _case(pipeline=2, micro_batches=1),
    "GPipe, offloaded activations": _case(pipeline=2, order="GPipe", micro_batches=4, stash=True, homes="hd"),
    "Interleaved": _case(pipeline=2, order="Interleaved", layers=4, micro_batches=4, homes="h", keep="All"),
    "a block on two stages": _case(pipeline=2, blocks=1, homes="h", tied=True, clipping="Global"),
    "probe over stages": _case(pipeline=2, layers=4, blocks=2, pattern="Segment", next_sharing=(4, "Cycle")),
    "experts over ranks": _case(data=2, expert_ranks=2, drawn=_MIXTURE, homes="h", clipping="Global"),
    "groups over ranks": _case(
        data=2, expert_ranks=2, drawn=_MIXTURE, homes="hD", expert_groups=2, keep="All", order="Layered"
    ),
    "shards of groups": _case(data=2, sharding="Full", drawn=_MIXTURE, homes="h", expert_groups=2, clipping="Global"),
    "balancing biases over ranks": _case(data=2, drawn=EIGHT_IN_BALANCE, expert_ranks=2, clipping="Global"),
    "balanced by step": _case(data=2, drawn=_BALANCED_BY_STEP, homes="h", sharding="Full"),
    "rounded gradients of shards": _case(
        data=2, sharding="Full", homes="dhD", clipping="Global", gradients="BFloat16", window=1
    ),
    "parts of sequences": _case(data=2, context_ranks=2, drawn=_CUT, sharding="Full", homes="h", clipping="Global"),
    "parts of documents": _case(
        data=2, context_ranks=2, drawn=_CUT, documents=True, homes="hd", keep="All", order="GPipe"
    ),
    "slices of layers": _case(data=2, tensor_ranks=2, drawn=_CUT, sharding="Full", homes="h", clipping="Global"),
    "slices of documents": _case(
        data=2, tensor_ranks=2, drawn=_CUT, documents=True, homes="hd", keep="All", order="GPipe"
    ),
    "replicas": _case(data=2, sharding="Full", replicas=2, homes="dh", clipping="PerUnit"),
    "replicas of shards": _case(data=4, sharding="Full", replicas=2, homes="dh", clipping="Global"),
}
ELASTIC = {
    "one of three workers": _case(homes="h", sequences=6, micro_batches=4),
    "two of three workers": _case(data=2, sharding="Full", homes="h", sequences=6),
    "three workers": _case(data=3, sharding="Full", homes="h", sequences=6, micro_batches=1),
}
_ON_CPUS = (
    *("disk", "shards on the host", "shards in all homes", "sharded gradients", "copies", "1F1B"),
    *("a block on two stages", "probe over stages", "experts over ranks", "shards of groups", "balanced by step"),
    *("replicas", "replicas of shards"),
)


def _overwrite_while_reloading(machine: Machine, _: Path) -> list[float]:
    """Stash an input into the buffer from which another input is being reloaded."""
    device = machine.rank.device
    offload = ActivationOffload(machine.streams(device), Trace(0), PinnedMemory(device), device)
    offload.prepare(1, 4, torch.float32)
    offload.stash(Stash(1, 0), torch.ones(1, 2, 2, device=device))
    offload.unstash(Unstash(1, 0))
    offload.stash(Stash(1, 1), torch.zeros(1, 2, 2, device=device))
    reloaded = offload.take_reloaded((1, 0))
    assert reloaded is not None, "the input was reloaded"
    numbers: list[float] = reloaded.flatten().tolist()
    offload.finish()
    offload.close()
    return numbers


def _replace_tokens_while_copying(machine: Machine, _: Path) -> list[float]:
    """Prepare the tokens of a run while those of the previous one are copied to the device."""
    device = machine.rank.device
    buffer = TokenBuffer(machine.streams(device), device, PinnedMemory(device))
    copies = []
    for run in range(2):
        buffer.prepare([(1, 2)])
        copies.append(buffer.to_device(torch.full((1, 3), run)))
    numbers: list[float] = [copy.sum().item() for copy in copies]
    buffer.close()
    return numbers


def _free_while_copying(machine: Machine, _: Path) -> list[float]:
    """Free pinned memory from which a copy to the device is in flight."""
    device = machine.rank.device
    block = Block(64, PinnedMemory(device))
    copy = torch.empty(64, dtype=torch.uint8, device=device).copy_(block.memory, non_blocking=True)
    block.close()
    numbers: list[float] = copy.tolist()
    return numbers


def _fetch_after_a_drop_of_the_other_pool(machine: Machine, folder: Path) -> list[float]:
    """Fetch experts into the slot of other experts, after a block was fetched and dropped."""
    case = replace(SEVERAL_RANKS["shards of groups"], expert_groups=1, window=1)
    engine = running.make_engine(case, Ranks(machine.rank.number, case.world, machine.rank.device), folder)
    copies = engine._executor._copies
    (block, experts), (_, other_experts) = map(case.layout.units_of, (1, 2))
    for unit in (experts, block, other_experts):
        copies.fetch(Fetch(unit))
        copies.drop(Drop(unit))
    slots = [slot for of_pool in engine._executor._copies._store.window.values() for slot in of_pool]
    numbers = [float(slot.sum()) for slot in slots]
    engine.close()
    return numbers


_CASES = ONE_RANK | SEVERAL_RANKS | ELASTIC
SCENARIOS: dict[str, Scenario] = {
    **{name: TrainedCase(case) for name, case in _CASES.items()},
    **{f"{name}, on CPUs": TrainedCase(_CASES[name], "cpu") for name in _ON_CPUS},
    "threads of an update": TrainedCase(ONE_RANK["several ranges"], threads=2),
    "trace": TrainedCase(ONE_RANK["host"], traces=True),
    "state is set": TrainedCase(ONE_RANK["device"], sets_state=True),
    "an input is overwritten while it is reloaded": Component(_overwrite_while_reloading),
    "tokens are replaced while they are copied": Component(_replace_tokens_while_copying),
    "memory is freed while it is copied": Component(_free_while_copying),
    "a fetch after a drop of the other pool": Component(_fetch_after_a_drop_of_the_other_pool, world=2),
}
