"""Token ids of micro-batches on their way to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pseudoreal_trainer.engine.ranks.streams import Event, Streams, synchronize
from pseudoreal_trainer.engine.state.pinned import Allocator, Block
from pseudoreal_trainer.plan.memory.pinned_arena import MicroBatchShape, token_bytes


class TokenBuffer:
    """Host memory for the tokens of all micro-batches of a run.

    It is pinned, because only then a copy does not wait for all passes launched so far. Without a GPU, tokens are used
    where they are, and nothing is prepared.
    """

    def __init__(self, streams: Streams, device: torch.device, memory: Allocator) -> None:
        self._streams, self._device, self._memory = streams, device, memory
        self._block = Block(0, memory)
        self._used = 0
        """Bytes that this run has used."""
        self._copied: Event = None
        """Event after which the copies of all runs so far are done."""

    def prepare(self, shapes: Sequence[MicroBatchShape]) -> None:
        """Allocate memory for micro-batches of these shapes, unless there is enough.

        Call this before the first pass of a run: pinning memory waits for all kernels of the device, and one of them
        may wait for a message that depends on this rank's later calls.
        """
        # A short wait: few passes, if any, come before the last copies of the previous run.
        synchronize(self._copied)
        self._used, needed = 0, token_bytes(shapes)
        if self._block.size < needed:
            self._block.close()
            self._block = Block(needed, self._memory)

    def bring(self, tokens: Tensor) -> Tensor:
        """Return the tokens, [B, T + 1], on the device."""
        if not self._streams.are_real or tokens.device.type == "cuda":
            return tokens
        begin, self._used = self._used, self._used + tokens.nbytes
        pinned = self._block.memory[begin : self._used].view(tokens.dtype).view(tokens.shape)
        pinned.copy_(tokens)
        there = torch.empty(tokens.shape, dtype=tokens.dtype, device=self._device)
        there.copy_(pinned, non_blocking=True)
        self._copied = self._streams.record_event()
        return there

    def close(self) -> None:
        self._block.close()
