"""Imports what a training process does, also what torch imports only when it is first used: a fork then has it all."""

import pseudoreal_trainer.phase
import torch
from torch import nn

with torch.device("meta"):
    nn.Linear(2, 2)
    nn.Embedding(2, 2)
torch.set_num_threads(1)

__all__ = ["pseudoreal_trainer"]
