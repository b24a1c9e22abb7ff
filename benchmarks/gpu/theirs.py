"""torch's fully_shard on one GPU, with the same weights, batches, clipping and precision; each block is a group."""

import torch
import torch.distributed as dist
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.gpu.cases import Case
from benchmarks.gpu.ours import NORM, drawn
from benchmarks.stacks.recompute import recompute_blocks
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY


class FullyShard:
    """Trains the case's model step by step. The constructor creates a process group of one rank."""

    def __init__(self, case: Case, model: Model, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        self._clipping = case.clipping
        with torch.device("meta"):
            self._model = Transformer(model, Sharing(blocks=model.layers))
        recompute_blocks(self._model)
        self._root = _shard(self._model, device, is_offloaded=case.home == "Host")
        # Tensors on the host become pinned memory here.
        self._model.to_empty(device="cpu" if case.home == "Host" else device)
        _fill(self._model, model, device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def train(self, batch: Tensor, micro_batches: int) -> float:
        """Train on [sequences, T + 1] and return the batch's mean loss in nats per token."""
        total = torch.zeros((), device=batch.device)
        for number, tokens in enumerate(batch.chunk(micro_batches), start=1):
            # The gradients of all micro-batches are reduced once, with the last.
            self._root.set_requires_gradient_sync(number == micro_batches)
            logits = self._model(tokens[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / micro_batches
            loss.backward()
            total += loss.detach()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(total)

    def settle(self) -> None:
        """Do nothing: no work is left after a step."""

    def pinned_bytes(self) -> int:
        """Return 0: all pinned memory comes from torch's allocator."""
        return 0

    def close(self) -> None:
        dist.destroy_process_group()

    def _clip(self) -> None:
        if self._clipping == "Global":
            nn.utils.clip_grad_norm_(self._model.parameters(), float(NORM))
        else:
            assert self._clipping == "None", "the cases of fully_shard clip globally or not at all"


def _shard(model: Transformer, device: torch.device, *, is_offloaded: bool) -> FSDPModule:
    """Shard the model in place and return it."""
    mesh = init_device_mesh(device.type, (1,))
    # Pinned memory raises on a machine without an accelerator.
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


@torch.no_grad()
def _fill(model: Transformer, spec: Model, device: torch.device) -> None:
    parameters = {name.replace(".block.", "."): parameter for name, parameter in model.named_parameters()}
    for index, unit in enumerate(units_of(spec, Sharing(blocks=spec.layers))):
        for described, values in zip(unit.parameters, drawn(unit, index, spec.layers, device), strict=True):
            parameter = parameters.pop(described.name)
            assert isinstance(parameter, DTensor), "fully_shard makes every parameter a DTensor"
            parameter.to_local().copy_(values)
    assert not parameters, f"every parameter has values now, also {[*parameters]}"
