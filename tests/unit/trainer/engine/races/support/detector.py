"""Happens-before analysis: finds two accesses to the same bytes that nothing orders, if one of them is a write.

An actor does one operation after another: a stream of a device, a process group's own stream, or a thread of the
host. A vector clock counts, for each actor, the operations that happened before (Mattern 1988, "Virtual time and global
states of distributed systems"). An access is ordered after an earlier access if its clock has counted it. So a race is
found in whatever order the two accesses happened to run, as in ThreadSanitizer.

Memory of a device is reused as by torch's caching allocator: a freed block may be given to the next tensor that is
allocated on the same stream, at once, without waiting for other streams.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Literal

Clock = dict[str, int]
"""Name of an actor -> number of its operations that happened before."""


def join(clock: Clock, other: Clock) -> None:
    """Add to `clock` all operations that `other` has counted."""
    for actor, count in other.items():
        if clock.get(actor, 0) < count:
            clock[actor] = count


@dataclass
class Actor:
    """A stream, a process group's stream, or a thread. Its clock counts its own operations, too."""

    name: str
    clock: Clock = field(default_factory=dict)

    def begin(self, *after: Clock) -> "Operation":
        """Begin the actor's next operation, which happens after the operations in these clocks."""
        for clock in after:
            join(self.clock, clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return Operation(self.name, dict(self.clock))


@dataclass(frozen=True)
class Operation:
    """An operation of an actor."""

    actor: str
    clock: Clock
    """Operations that happened before, and this operation."""

    @property
    def count(self) -> int:
        return self.clock[self.actor]


@dataclass(frozen=True)
class _Access:
    """Access of an operation to a range of bytes of a block."""

    begin: int
    end: int
    is_write: bool
    actor: str
    count: int
    """Number of the operation among those of the actor."""
    label: str
    is_reused: bool = False
    """Whether the access was to memory that was freed afterwards."""

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.actor, 0) >= self.count

    def conflicts(self, begin: int, end: int, *, is_write: bool) -> bool:
        return self.begin < end and begin < self.end and (is_write or self.is_write)


Place = Literal["device", "pinned", "pageable"]
"""Memory of the device; memory of the host that is pinned for copies to and from the device; other host memory."""


@dataclass
class Block:
    """Memory of a tensor and of its views."""

    place: Place
    size: int
    """Size in bytes."""
    stream: Actor | None = None
    """Stream on which the memory was allocated; None: memory of the host."""
    accesses: dict[tuple[int, int, bool, str], _Access] = field(default_factory=dict)
    """(begin, end, whether it writes, actor) -> newest of these accesses. Accesses that later ones make irrelevant are
    left out."""
    users: dict[str, Actor] = field(default_factory=dict)
    """Threads that have used the memory."""


@dataclass(frozen=True)
class Race:
    """A defect that the detector has found."""

    kind: Literal["race", "reuse", "abandoned", "misuse", "fault"]
    """race: two unordered accesses. reuse: an access that is not ordered before the next tensor in the same memory.
    abandoned: a message whose work was dropped before anybody knew that it was done. misuse: anything else that a
    device would refuse. fault: a kernel that traps."""
    earlier: str
    """Earlier access; empty unless there are two."""
    later: str
    """Later access, or a sentence."""

    def __str__(self) -> str:
        if self.kind in ("race", "reuse"):
            return f"{self.kind}: {self.later}; not ordered after {self.earlier}"
        return f"{self.kind}: {self.later}"


class Detector:
    """Accesses so far, and the races among them. Any thread may call it while it holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races: dict[Race, None] = {}
        self.operations = 0
        self._freed: dict[str, dict[tuple[str, bool], _Access]] = {}
        """Stream -> (actor, whether it writes) -> newest of the actor's accesses to freed memory of the stream that no
        thread knew to be done when the memory was freed."""

    def allocate(self, place: Place, size: int, stream: Actor | None = None, now: Clock | None = None) -> Block:
        """Return a new block. `now`: clock of the allocating thread."""
        block = Block(place, size, stream)
        if stream is not None:
            # Any of the freed blocks may be the one that the allocator gives away.
            for access in self._freed.get(stream.name, {}).values():
                if not access.is_before(now or {}):
                    whole = replace(access, begin=0, end=size, is_reused=True)
                    block.accesses[0, size, access.is_write, access.actor] = whole
        return block

    def free(self, block: Block, now: Clock) -> None:
        """Give a block back to the allocator of its stream. `now`: clock of the thread that frees it.

        The memory is free once the last thread has let go of it. So this is after all that its users have done, which
        may be a little more than what they had done when they let go.
        """
        if block.stream is None:
            return
        before = dict(now)
        for user in block.users.values():
            join(before, user.clock)
        freed = self._freed.setdefault(block.stream.name, {})
        for access in block.accesses.values():
            newest = freed.get((access.actor, access.is_write))
            if not access.is_before(before) and (newest is None or newest.count < access.count):
                freed[access.actor, access.is_write] = access

    def access(self, block: Block, span: tuple[int, int], operation: Operation, label: str, *, is_write: bool) -> None:
        """Record an access to a range of bytes of a block, and report earlier ones that it is not ordered after.
        `span`: first byte, and the byte after the last one."""
        begin, end = span
        for key, access in [*block.accesses.items()]:
            is_ordered = access.is_before(operation.clock)
            if not is_ordered and access.conflicts(begin, end, is_write=is_write):
                self._report(access, operation, label, is_write=is_write)
            # A later access conflicts with this write if it conflicts with anything that this write covers.
            if is_write and begin <= access.begin and access.end <= end:
                del block.accesses[key]
        newest = _Access(begin, end, is_write, operation.actor, operation.count, label)
        block.accesses[begin, end, is_write, operation.actor] = newest

    def report(self, race: Race) -> None:
        with self.lock:
            self.races[race] = None

    def _report(self, access: _Access, operation: Operation, label: str, *, is_write: bool) -> None:
        earlier = f"{access.actor} {'writes' if access.is_write else 'reads'} in {access.label}"
        later = f"{operation.actor} {'writes' if is_write else 'reads'} in {label}"
        if access.is_reused:
            self.report(Race("reuse", f"{earlier}, freed since", later))
        else:
            self.report(Race("race", earlier, later))
