"""Token ids of micro-batches on their way to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.lanes import Lanes, Mark, reach
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.forecast.memory.crossing import Shape, token_bytes


class TokenBuffer:
    """Host memory in which the tokens of all micro-batches of a run wait. Only from pinned memory does a copy not wait
    for all passes that are called already. Without a GPU, tokens are used where they are, and nothing is prepared."""

    def __init__(self, lanes: Lanes, device: torch.device, memory: Allocator) -> None:
        self._lanes, self._device, self._memory = lanes, device, memory
        self._block = Block(0, memory)
        self._used = 0
        """Bytes that this run has used."""
        self._copied: Mark = None
        """The mark after which the copies of all runs so far are made."""

    def prepare(self, shapes: Sequence[Shape]) -> None:
        """Makes memory for micro-batches of these shapes, before the first pass of a run: pinning memory waits for all
        kernels of the device, and one of them may wait for a message that depends on what comes after."""
        # The last copies of the run before are behind few passes, if any.
        reach(self._copied)
        self._used, needed = 0, token_bytes(shapes)
        if self._block.size < needed:
            self._block.close()
            self._block = Block(needed, self._memory)

    def bring(self, tokens: Tensor) -> Tensor:
        """The tokens, [B, T + 1], on the device."""
        if not self._lanes.are_real or tokens.device.type == "cuda":
            return tokens
        begin, self._used = self._used, self._used + tokens.nbytes
        pinned = self._block.memory[begin : self._used].view(tokens.dtype).view(tokens.shape)
        pinned.copy_(tokens)
        there = torch.empty(tokens.shape, dtype=tokens.dtype, device=self._device)
        there.copy_(pinned, non_blocking=True)
        self._copied = self._lanes.mark()
        return there

    def close(self) -> None:
        self._block.close()
