"""Workers rendezvous and get their rank numbers and the ranks' store."""

from collections.abc import Sequence

import pytest
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousTimeoutError

from tests.support.patience import wait_for
from tests.unit.trainer.runtime.rendezvous.support.meetings import coming, meeting


def backwards(seats: Sequence[WorkerDescription]) -> list[int]:
    return [len(seats) - 1 - seat.worker for seat in seats]


def port_of(met: RendezvousInfo) -> int:
    where = met.bootstrap_store_info
    assert where is not None
    assert where.master_addr == "127.0.0.1"
    return int(where.master_port)


def test_eleven_workers_get_the_group_ranks_of_their_indices() -> None:
    """The order of arrival does not matter."""
    with meeting(11) as held, coming(held) as come:
        guests = [come(worker) for worker in (10, 2, 1, *range(3, 10))]
        host = come(0)
        assert host.result().rank == 0
        assert [guest.result().rank for guest in guests] == [10, 2, 1, *range(3, 10)]
        assert {met.result().world_size for met in (host, *guests)} == {11}


def test_workers_get_the_assigned_group_ranks() -> None:
    with meeting(3, backwards) as held, coming(held) as come:
        assert [met.result().rank for met in [come(worker) for worker in range(3)]] == [2, 1, 0]


def test_all_workers_reach_one_store_by_their_own_loopback() -> None:
    with meeting(3) as held, coming(held) as come:
        stores = [met.result().store for met in [come(worker) for worker in range(3)]]
        for number, store in enumerate(stores):
            store.set(f"large {number}", str(number) * 2_000_000)
        for number, store in enumerate(stores):
            assert store.add("count", 1) == number + 1
        assert [len(store.get("large 1")) for store in stores] == [2_000_000] * 3


def test_a_single_worker_listens_on_no_open_port() -> None:
    with meeting(1) as held, coming(held) as come:
        met = come(0, None).result()
        assert (met.rank, met.world_size) == (0, 1)
        met.store.set("key", "value")
        with pytest.raises(ConnectionRefusedError):
            held.call()


def test_the_ranks_store_listens_on_the_loopback_interface_alone() -> None:
    with meeting(2) as held, coming(held) as come:
        ports = [port_of(met.result()) for met in [come(0), come(1)]]
        assert len(set(ports)) == 2, "each worker reaches the store at a port of its own"
        with open("/proc/net/tcp") as ours, open("/proc/net/tcp6") as sixes:
            local = [line.split()[1] for line in [*ours, *sixes] if line.split()[3] == "0A"]
    for port in ports:
        found = [address for address in local if address.endswith(f":{port:04X}")]
        assert found == [f"0100007F:{port:04X}"]


def test_an_error_in_the_assignment_reaches_all_workers() -> None:
    def refuses(_: Sequence[WorkerDescription]) -> list[int]:
        raise ValueError("there is no number for them")

    with meeting(3, refuses) as held, coming(held) as come:
        for met in [come(worker) for worker in range(3)]:
            with pytest.raises(RuntimeError, match="have no numbers: there is no number for them"):
                met.result()


def test_an_incomplete_rendezvous_names_the_missing_workers() -> None:
    with meeting(4, seconds=1) as held, coming(held) as come:
        host, guest = come(0), come(2)
        with pytest.raises(RendezvousTimeoutError, match="of 4 workers these have not come: 1, 3"):
            host.result()
        with pytest.raises(RendezvousTimeoutError, match="worker 0 has not given this worker a number"):
            guest.result()


def test_a_taken_rendezvous_port_is_named() -> None:
    """With hostNetwork, another job on the node may use the port."""
    with meeting(2) as held, coming(held) as come:
        come(0)
        held.await_door()
        with pytest.raises(RendezvousConnectionError, match=f"cannot hold the meeting at port {held.port}"):
            come(0).result()
        come(1)


def test_a_worker_with_a_broken_connection_is_not_counted_and_may_connect_again() -> None:
    with meeting(3) as held, coming(held) as come:
        host, lost = come(0), come(1)
        wait_for("worker 1", lambda: held.missing() == [2], lambda: str(held.missing()))
        held.handlers[1].shutdown()
        wait_for("its loss", lambda: held.missing() == [1, 2], lambda: str(held.missing()))
        assert lost.cancelled() or lost.exception() is not None
        others = [come(2), come(1)]
        assert host.result().rank == 0
        assert [met.result().rank for met in others] == [2, 1]


def test_the_first_of_two_pods_that_come_as_one_worker_ends() -> None:
    with meeting(3) as held, coming(held) as come:
        host, first = come(0), come(1)
        wait_for("worker 1", lambda: held.missing() == [2], lambda: str(held.missing()))
        second = come(1)
        with pytest.raises(RuntimeError, match="another pod has come as worker 1, at node-1"):
            first.result()
        third = come(2)
        assert [met.result().rank for met in (host, second, third)] == [0, 1, 2]


def test_a_worker_that_comes_after_the_rendezvous_gets_no_group_rank() -> None:
    with meeting(2, seconds=1) as held, coming(held) as come:
        assert [met.result().rank for met in [come(0), come(1)]] == [0, 1]
        with pytest.raises(RendezvousTimeoutError):
            come(1).result()


def test_the_rendezvous_tells_torchrun_that_no_worker_joins_later() -> None:
    with meeting(1) as held:
        handler = held.handler(0, None)
        assert (handler.use_agent_store, handler.num_nodes_waiting(), handler.is_closed()) == (True, 0, False)
        assert (handler.get_backend(), handler.get_run_id()) == ("pseudoreal", "job-phase-1")
        handler.set_closed()
