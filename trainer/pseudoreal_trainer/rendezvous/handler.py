"""torchrun's rendezvous, after which the workers agree on their numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from pseudoreal_trainer.rendezvous.seats import Seat

BACKEND = "numbered-c10d"
"""Name by which torchrun knows it."""

Numbering = Callable[[Sequence[Seat]], Sequence[int]]
"""From the seats of all workers, as they have come, to a number for each."""


class NumberedRendezvous(RendezvousHandler):
    """The rendezvous of `inner`, which gives out the numbers of `numbering` instead of its own."""

    def __init__(self, inner: RendezvousHandler, seat: Seat, numbering: Numbering) -> None:
        self._inner, self._seat, self._numbering = inner, seat, numbering

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        met = self._inner.next_rendezvous()
        number = agreed_number(met.store, met.rank, met.world_size, self._seat, self._numbering)
        assert met.bootstrap_store_info is not None, "torchrun's own rendezvous says where the ranks' store is"
        # It stays there, whoever is rank 0: ranks only look it up.
        return RendezvousInfo(met.store, number, met.world_size, met.bootstrap_store_info)

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def numbered(seat: Seat, numbering: Numbering) -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls for a handler of BACKEND."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        asked: dict[str, Any] = vars(parameters) | {"backend": "c10d"}
        own = RendezvousParameters(**{name: asked[name] for name in asked if name != "config"}, **parameters.config)
        backend, store = create_backend(own)
        return NumberedRendezvous(create_handler(store, backend, own), seat, numbering)

    return create


def agreed_number(store: Store, arrival: int, workers: int, seat: Seat, numbering: Numbering) -> int:
    """This worker's number. Every worker calls this with another `arrival` below `workers`; who is the last gives out
    the numbers of all. Raises RuntimeError where the numbering has none for these seats."""
    store.set(f"seat/{arrival}", seat.to_json())
    if store.add("seated", 1) == workers:
        arrivals = range(workers)
        seats = [Seat.from_json(text) for text in store.multi_get([f"seat/{one}" for one in arrivals])]
        for one, number in zip(arrivals, _numbers(seats, numbering), strict=True):
            store.set(f"number/{one}", number)
    number = store.get(f"number/{arrival}").decode()
    if not number.isdecimal():
        raise RuntimeError(f"the workers have no numbers: {number}")
    return int(number)


def _numbers(seats: Sequence[Seat], numbering: Numbering) -> list[str]:
    """The number of each worker, or for all of them why they have none: the others wait for an answer."""
    try:
        return [str(number) for number in numbering(seats)]
    except ValueError as error:
        return [str(error)] * len(seats)
