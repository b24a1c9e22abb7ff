"""NVIDIA's devices, and AMD's, which have the same names in torch."""

import torch

from pseudoreal_trainer.accelerator.adapter import Adapter


class CudaAdapter(Adapter):
    """Calls for one of NVIDIA's or AMD's devices."""

    def event(self, *, is_timed: bool = False) -> torch.Event:
        # A thread that waits for a blocking event sleeps. Waiting for others takes a whole core, which AdamW on the
        # host or another rank needs. torch.Event ignores `blocking`.
        return torch.cuda.Event(enable_timing=is_timed, blocking=True)
