"""Imports everything needed by training processes and test files, including torch's lazy imports."""

import pseudoreal_trainer.checkpoint.delink
import pseudoreal_trainer.training.phase
import pytest
import torch
from torch import nn

with torch.device("meta"):
    nn.Linear(2, 2)
    nn.Embedding(2, 2)
# On a busy machine, threads that wait for each other would slow the tests.
torch.set_num_threads(1)

__all__ = ["pseudoreal_trainer", "pytest"]
