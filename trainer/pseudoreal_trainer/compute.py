"""The loss of some samples, in the precision that the spec asks for."""

from contextlib import AbstractContextManager, nullcontext

import torch
from pseudoreal_api.model_spec import Precision
from torch import Tensor
from torch.nn import functional as F

from pseudoreal_trainer.corpus import Bytes
from pseudoreal_trainer.model import Transformer


def master_dtype(precision: Precision) -> torch.dtype:
    return torch.float64 if precision.compute == "float64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    if precision.compute != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def loss_sum(model: Transformer, windows: Bytes, precision: Precision) -> Tensor:
    """Sum over all tokens of the windows [B, T + 1] of the negative log likelihood in nats, in the masters' type."""
    device = model.head.weight.device
    tokens = torch.from_numpy(windows).to(device, torch.int64)
    with autocast(precision, device):
        logits = model(tokens[:, :-1])  # [B, T, 256]
    return F.cross_entropy(logits.flatten(0, 1).to(master_dtype(precision)), tokens[:, 1:].flatten(), reduction="sum")
