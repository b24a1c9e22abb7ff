"""torchtitan's mixture of experts: its router, its all-to-all dispatch and its grouped products.

Everything else is fully_shard's, as in torchtitan. The experts always compute in bfloat16.
"""

from collections.abc import Iterator

import torch
from pseudoreal_trainer.model.reference import Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.moe.beside import plain
from benchmarks.moe.beside.cases import EXPERT_SIZE, HIDDEN, PER_TOKEN, Case
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, cross_entropy


def train(case: Case, batches: Tensor, rank: int, world: int) -> Iterator[Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    model = plain.plain_model(case, lambda weights: _mixture(weights, case, mesh))
    experts = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    root = _shard(model, case, mesh, set(experts))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, foreach=False
    )
    for batch in batches:
        total = torch.zeros(())
        for number, tokens in enumerate(plain.micro_batches(case, batch, rank, world), start=1):
            root.set_requires_gradient_sync(number == case.micro_batches)
            loss = cross_entropy(model(tokens[:, :-1]).float(), tokens) / case.micro_batches
            loss.backward()
            total += loss.detach()
        for expert in experts:
            # The expert's gradient is a sum over the ranks' tokens; all other gradients are means.
            assert expert.grad is not None, "every expert has had tokens, and so a gradient"
            expert.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _mixture(weights: plain.Weights, case: Case, mesh: DeviceMesh) -> nn.Module:
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    set_spmd_backend("partial_dtensor")  # DTensors, as here; the other backend needs meshes of torchtitan's trainer
    moe = MoE.Config(
        num_experts=case.experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=EXPERT_SIZE, num_experts=case.experts),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=case.experts, top_k=PER_TOKEN),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=case.experts,
            gate=Linear.Config(in_features=HIDDEN, out_features=case.experts),
            top_k=PER_TOKEN,
            score_func="softmax",
            route_norm=True,
        ),
        load_balance_coeff=None,
    ).build()
    moe.router.gate.weight = nn.Parameter(weights.router)
    for name, weight in (("w1_EFD", weights.gate), ("w2_EDF", weights.down), ("w3_EFD", weights.up)):
        spread = distribute_tensor(weight, mesh, [Shard(0)])
        setattr(moe.routed_experts.inner_experts, name, nn.Parameter(spread))
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    module: nn.Module = moe
    return module


def _shard(model: Transformer, case: Case, mesh: DeviceMesh, experts: set[nn.Parameter]) -> FSDPModule:
    """Shard the model in place, except the experts."""
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, case.compute), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=experts)
    return fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=experts)
