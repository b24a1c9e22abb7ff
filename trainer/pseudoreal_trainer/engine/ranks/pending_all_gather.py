"""Hierarchical all-gather of a unit: first across replicas, then within this replica."""

import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import UnitGroups
from pseudoreal_trainer.engine.ranks.trace import Trace


class PendingAllGather:
    """An all-gather in flight, in one stage or in two.

    On a GPU the second stage is launched at once, as its stream waits for the first. On a CPU the calling thread would
    wait, and would not come to work that another pipeline rank needs. There the second stage starts when
    `can_launch_second` says so, or where the plan needs the copy. All ranks launch second stages in the order of the
    first stages.
    """

    def __init__(self, groups: UnitGroups, flat: Tensor, part: Tensor, trace: Trace) -> None:
        """`flat`: [all parts], to be filled. `part`: this rank's own part, on the same device. The gather owns both
        until it is done; nothing may change `part` before."""
        self._groups, self._flat, self._part, self._trace = groups, flat, part, trace
        self._inter_work: dist.Work | None = None
        self._intra_work: dist.Work | None = None
        if groups.inter is None:
            self._intra_work = self._gather_intra(part)
            return
        inter_slice = groups.inter_slice(flat)
        self._trace.move("replicas", inter_slice.nbytes - part.nbytes)
        self._inter_work = dist.all_gather_into_tensor(inter_slice, part, group=groups.inter, async_op=True)
        if flat.is_cuda:
            self.launch_second()

    @property
    def is_launched(self) -> bool:
        """Whether all stages were launched."""
        return self._inter_work is None

    @property
    def can_launch_second(self) -> bool:
        """Whether the second stage can be launched without waiting."""
        return self._inter_work is None or self._inter_work.is_completed()

    def launch_second(self) -> None:
        """Wait for the first stage and launch the second, unless it was launched."""
        if self._inter_work is not None:
            self._inter_work.wait()
            self._inter_work = None
            self._intra_work = self._gather_intra(self._groups.inter_slice(self._flat))

    def wait(self) -> None:
        self.launch_second()
        if self._intra_work is not None:
            self._intra_work.wait()

    def _gather_intra(self, own: Tensor) -> dist.Work | None:
        if self._groups.intra is None:
            return None
        self._trace.move("collective", self._flat.nbytes - own.nbytes)
        return dist.all_gather_into_tensor(self._flat, own, group=self._groups.intra, async_op=True)
