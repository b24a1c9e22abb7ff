"""AdamW over the master weights, and its state as named arrays."""

import torch
from pseudoreal_api.model_spec import Optimizer as OptimizerSpec
from torch import Tensor, nn
from torch.optim import AdamW

from pseudoreal_trainer.checkpoint import FIRST_MOMENT, SECOND_MOMENT, STEP, Arrays

_KEYS = {"exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT, "step": STEP}


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> AdamW:
    """Weight decay acts on matrices (the embedding and the head among them), not on the norms' vectors."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": float(spec.weight_decay)},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=float(spec.learning_rate), betas=(float(spec.beta1), float(spec.beta2)), fused=True)


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, spec: OptimizerSpec) -> None:
    if spec.clipping.mode == "global":
        nn.utils.clip_grad_norm_(model.parameters(), float(spec.clipping.norm))


def optimizer_arrays(model: nn.Module, optimizer: AdamW) -> Arrays:
    """`<parameter>.<kind>` -> array; zeros before the first step."""
    arrays: Arrays = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter) or _zero_state(parameter)
        arrays |= {f"{name}.{kind}": state[key].detach().cpu().numpy() for key, kind in _KEYS.items()}
    return arrays


def load_optimizer(model: nn.Module, optimizer: AdamW, arrays: Arrays) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {key: torch.from_numpy(arrays[f"{name}.{kind}"]).clone() for key, kind in _KEYS.items()}
        for index, name in enumerate(ordered)
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _zero_state(parameter: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros_like(parameter)
    return {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.tensor(0.0)}
