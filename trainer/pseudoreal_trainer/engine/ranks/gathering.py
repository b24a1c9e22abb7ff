"""Hierarchical all-gather of a unit: first across replicas, then within this replica."""

import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import UnitGroups
from pseudoreal_trainer.engine.ranks.trace import Trace


class Gathering:
    """An all-gather in flight, in one stage or in two.

    On a GPU the second stage is launched at once, as its stream waits for the first. On a CPU the calling thread would
    wait, and would not come to work that another pipeline rank needs. There the second stage starts when `goes_on` says
    that it can, or where the plan needs the copy. All ranks launch second stages in the order of the first stages.
    """

    def __init__(self, groups: UnitGroups, flat: Tensor, part: Tensor, trace: Trace) -> None:
        """`flat`: [all parts], to be filled. `part`: this rank's own part, on the same device. The gather owns both
        until it is done; nothing may change `part` before."""
        self._groups, self._flat, self._part, self._trace = groups, flat, part, trace
        self._across: dist.Work | None = None
        self._within: dist.Work | None = None
        if groups.inter is None:
            self._within = self._gather_within(part)
            return
        inter_slice = groups.inter_slice(flat)
        self._trace.move("replicas", inter_slice.nbytes - part.nbytes)
        self._across = dist.all_gather_into_tensor(inter_slice, part, group=groups.inter, async_op=True)
        if flat.is_cuda:
            self.begin_second()

    @property
    def has_begun(self) -> bool:
        """Whether all stages were launched."""
        return self._across is None

    @property
    def goes_on(self) -> bool:
        """Whether the second stage can be launched without waiting."""
        return self._across is None or self._across.is_completed()

    def begin_second(self) -> None:
        """Wait for the first stage and launch the second, unless it was launched."""
        if self._across is not None:
            self._across.wait()
            self._across = None
            self._within = self._gather_within(self._groups.inter_slice(self._flat))

    def wait(self) -> None:
        self.begin_second()
        if self._within is not None:
            self._within.wait()

    def _gather_within(self, own: Tensor) -> dist.Work | None:
        if self._groups.intra is None:
            return None
        self._trace.move("collective", self._flat.nbytes - own.nbytes)
        return dist.all_gather_into_tensor(self._flat, own, group=self._groups.intra, async_op=True)
