"""Number formats in which a phase computes and keeps its state."""

import torch
from pseudoreal_api.spec.optimizer import Precision


def master_dtype(precision: Precision) -> torch.dtype:
    return torch.float64 if precision.compute == "float64" else torch.float32


def compute_dtype(precision: Precision) -> torch.dtype:
    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[precision.compute]
