"""DeepSpeed's mixture of experts under ZeRO-2: its gate, its dispatch, and its experts one by one."""

from collections.abc import Iterator
from typing import Any

import torch
from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from pseudoreal_trainer.model.feed_forward import FeedForward
from torch import Tensor, nn

from benchmarks.moe.beside import plain
from benchmarks.moe.beside.cases import EXPERT_SIZE, HIDDEN, PER_TOKEN, RANKS, SEQUENCES, Case
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, cross_entropy


def train(case: Case, batches: Tensor, rank: int, world: int) -> Iterator[Tensor]:
    # Imported here, because the import changes torch for the other stacks too.
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = plain.plain_model(case, lambda weights: _Mixture(weights, case, rank))
    groups: Any = {"params": [*model.parameters()], "name": "all"}
    optimizer = torch.optim.AdamW(
        split_params_into_different_moe_groups_for_optimizer(groups),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPSILON,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_config(case, world), dist_init_required=False
    )
    for batch in batches:
        total = torch.zeros(())
        for tokens in plain.micro_batches(case, batch, rank, world):
            loss = cross_entropy(engine(tokens[:, :-1]).float(), tokens)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # updates with the last one
            total += loss.detach() / case.micro_batches
        yield total


class _Mixture(nn.Module):
    """DeepSpeed's MoE layer without dropped or randomly drawn tokens, so that it computes the same as ours."""

    def __init__(self, weights: plain.Weights, case: Case, rank: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = FeedForward(HIDDEN, FeedForwardSpec(size=EXPERT_SIZE, activation="SwiGLU"))
        self.moe = MoE(
            HIDDEN,
            expert,
            num_experts=case.experts,
            ep_size=RANKS,
            k=PER_TOKEN,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(weights.router)
            own = zip(*(plain.local(each, rank) for each in (weights.gate, weights.up, weights.down)), strict=True)
            for module, (gate, up, down) in zip(self.moe.deepspeed_moe.experts.deepspeed_experts, own, strict=True):
                module.gate.weight.copy_(gate)
                module.up.weight.copy_(up)
                module.down.weight.copy_(down)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.moe(features)[0]
        return out


def _config(case: Case, world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES // world // case.micro_batches,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": case.compute == "bfloat16"},
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
