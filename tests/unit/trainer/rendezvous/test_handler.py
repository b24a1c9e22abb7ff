"""Workers that meet as torchrun's agents do, in threads of one process."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from pseudoreal_trainer.rendezvous.handler import BACKEND, Numbering, numbered
from pseudoreal_trainer.rendezvous.seats import Seat
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from tests.support.ports import free_port


def meet(workers: int, numbering: Numbering) -> list[tuple[int, RendezvousHandler]]:
    """The number that each worker gets, with its handler."""
    port = free_port()

    def one(worker: int) -> tuple[int, RendezvousHandler]:
        # Names as those of pods: the tenth comes before the second.
        parameters = RendezvousParameters(
            backend=BACKEND,
            endpoint=f"127.0.0.1:{port}",
            run_id="job-phase-1",
            min_nodes=workers,
            max_nodes=workers,
            local_addr=f"127.0.0.{worker + 1}",
            is_host="true" if worker == 0 else "false",
        )
        handler = numbered(Seat(worker, "node", None), numbering)(parameters)
        return handler.next_rendezvous().rank, handler

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(one, range(workers)))


def by_worker(seats: Sequence[Seat]) -> list[int]:
    return [seat.worker for seat in seats]


def backwards(seats: Sequence[Seat]) -> list[int]:
    return [len(seats) - 1 - seat.worker for seat in seats]


def test_eleven_workers_have_the_numbers_of_their_pods() -> None:
    """torchrun alone gives worker 10 the number 2, as the address 127.0.0.11 comes before 127.0.0.2."""
    met = meet(11, by_worker)
    assert [number for number, _ in met] == [*range(11)]
    assert {handler.get_run_id() for _, handler in met} == {"job-phase-1"}


def test_workers_have_the_numbers_that_are_given_out() -> None:
    assert [number for number, _ in meet(3, backwards)] == [2, 1, 0]


def test_the_handler_passes_on_what_torchrun_asks() -> None:
    handlers = [handler for _, handler in meet(2, by_worker)]
    assert all(handler.use_agent_store for handler in handlers)
    assert all(handler.num_nodes_waiting() == 0 for handler in handlers)
    assert not handlers[0].is_closed()
    handlers[0].set_closed()
    assert handlers[0].is_closed()
    assert all(handler.shutdown() for handler in handlers)
