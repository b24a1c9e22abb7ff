"""Configuration of an engine."""

from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer as OptimizerSpec
from pseudoreal_api.spec.optimizer import ProductFormat

from pseudoreal_trainer.plan.units import Unit


@dataclass(frozen=True)
class Blueprint:
    """Configuration of an engine besides its layout."""

    model: Model
    optimizer: OptimizerSpec
    units: tuple[Unit, ...]
    """Units of the model, each with all of its experts, even if a rank holds only some of them."""
    master: torch.dtype
    compute: torch.dtype
    moments: torch.dtype
    """Dtype of stored moments: the master dtype, bfloat16, or `blocks.BLOCKS`."""
    gradients: torch.dtype
    """Dtype to which summed gradients are rounded: the master dtype, or bfloat16."""
    compiled: bool
    offload_directory: Path
    seed: int
    """Seed of the random bits that round moments."""
    end_of_document: int | None = None
    """Token id that ends a document; attention stays within documents. None: attention spans whole sequences."""
    products: ProductFormat = "Compute"
    """Format of the operands of products in the linear layers of attention, MLPs and shared experts (`model.float8`).
    Routers and routed experts never multiply in float8."""
