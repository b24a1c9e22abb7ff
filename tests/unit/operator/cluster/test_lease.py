"""Which operator works, as decided by the Lease, in virtual time."""

import asyncio
from typing import Any

import pytest
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.lease import LeaseLost, keep_lease

from tests.unit.operator.cluster.support import virtual_time
from tests.unit.operator.cluster.support.fake_leases import Client, Server
from tests.unit.operator.cluster.support.lease_holders import HOUR, Operator, lease, now, run_two_operators


def test_missing_lease_is_acquired_at_once() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(0.001)
        assert operator.is_working
        assert server.lease
        spec = server.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("first", 15)
        assert spec["renewTime"].endswith("Z")
        await operator.stop()

    virtual_time.run(main())


@pytest.mark.parametrize("spec", [{"spec": {"holderIdentity": ""}}, {"spec": {}}, {}])
def test_released_lease_is_acquired_at_once(spec: dict[str, Any]) -> None:
    async def main() -> None:
        server = Server()
        server.store({"metadata": {"name": "pseudoreal"}, **spec})
        operator = Operator(server, "first")
        await asyncio.sleep(0.001)
        assert operator.is_working
        await operator.stop()

    virtual_time.run(main())


def test_restarted_container_acquires_its_own_lease_at_once() -> None:
    async def main() -> None:
        server = Server()
        await _start_and_crash(server, "same-pod")
        again = Operator(server, "same-pod")
        await asyncio.sleep(0.001)
        assert again.is_working
        await again.stop()

    virtual_time.run(main())


def test_holder_renews_the_lease() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(100)
        assert operator.is_working
        assert 45 <= server.writes <= 51
        await operator.stop()

    virtual_time.run(main())


def test_holder_that_stops_releases_the_lease_at_once() -> None:
    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (first, second):
            ending = now()
            await first.stop()
            await asyncio.sleep(0.001)
            assert second.is_working
            assert second.began
            assert second.began - ending < 0.001
            assert server.holder == "second"

    virtual_time.run(main())


def test_lease_records_acquire_time_and_transitions() -> None:
    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (first, second):
            assert server.lease
            held = server.lease["spec"]
            assert held["leaseTransitions"] == 0
            await asyncio.sleep(60)
            assert server.lease["spec"]["acquireTime"] == held["acquireTime"] <= server.lease["spec"]["renewTime"]
            await first.stop()
            await asyncio.sleep(2.1)
            assert second.is_working
            taken = server.lease["spec"]
            assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("second", 1)
            assert taken["acquireTime"] > held["acquireTime"]

    virtual_time.run(main())


def test_crashed_holders_lease_is_acquired_after_it_expires() -> None:
    async def main() -> None:
        async with run_two_operators(Server()) as (first, second):
            await first.crash()
            crashed = now()
            await asyncio.sleep(20)
            assert second.began
            assert 13 <= second.began - crashed <= 15

    virtual_time.run(main())


def test_standby_waits_for_the_lease_duration_of_another_release() -> None:
    """Earlier releases hold the Lease for half a minute."""

    async def main() -> None:
        server = Server()
        spec = {"holderIdentity": "old", "leaseDurationSeconds": 30}
        server.store({"metadata": {"name": "pseudoreal"}, "spec": spec})
        new = Operator(server, "new")
        await asyncio.sleep(29.9)
        assert not new.is_working
        await asyncio.sleep(0.2)
        assert new.is_working
        await new.stop()

    virtual_time.run(main())


def test_lease_expiry_ignores_the_clocks_of_other_machines() -> None:
    """The holder's clock, and so its renewTime, is years behind, but it renews the Lease."""

    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (_, second):
            for _ in range(60):
                assert server.lease
                server.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
                await asyncio.sleep(1)
            assert not second.is_working

    virtual_time.run(main())


def test_disconnected_holder_stops_writing_before_the_next_one_starts() -> None:
    async def main() -> None:
        async with run_two_operators(Server()) as (first, second):
            first.cut_off()
            begun = now()
            await asyncio.sleep(100)
            assert second.began
            (*_, (_, closed)) = first.fence.turns
            assert closed <= begun + 10
            assert closed + 5 <= second.began
            assert not first.is_working
            assert not first.ended, "it waits"

    virtual_time.run(main())


def test_operators_survive_half_an_hour_without_an_api_server_and_one_leads_within_20_s() -> None:
    async def main() -> None:
        async with run_two_operators(Server()) as (first, second):
            for operator in (first, second):
                operator.cut_off()
            await asyncio.sleep(1800)
            assert not first.task.done()
            assert not second.task.done()
            assert not first.is_working
            assert not second.is_working
            for operator in (first, second):
                operator.client.delay = lambda: 0.0
            await asyncio.sleep(20)
            assert first.is_working + second.is_working == 1

    virtual_time.run(main())


def test_holder_survives_half_a_minute_without_an_api_server() -> None:
    """The holder writes nothing in the meantime and then continues, because no other operator could take the Lease."""

    async def main() -> None:
        operator = Operator(Server(), "first")
        await asyncio.sleep(60)
        operator.cut_off()
        await asyncio.sleep(10)
        assert not operator.is_working
        await asyncio.sleep(20)
        operator.client.delay = lambda: 0.0
        await asyncio.sleep(3)
        assert operator.is_working
        await operator.stop()

    virtual_time.run(main())


def test_holder_ends_if_another_led_meanwhile_even_if_the_lease_is_free() -> None:
    """The operator's observations from before are stale."""

    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (first, second):
            first.cut_off()
            await asyncio.sleep(20)
            assert second.is_working
            await second.stop()
            assert server.holder == ""
            first.client.delay = lambda: 0.0
            await asyncio.sleep(5)
            assert first.ended
            assert not first.is_working

    virtual_time.run(main())


def test_lease_is_not_released_while_a_write_may_still_arrive() -> None:
    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (first, second):
            with pytest.raises(OSError, match="cut off"), first.fence.track_write():
                raise OSError("cut off")
            await first.stop()
            stopped = now()
            assert server.holder == "first"
            await asyncio.sleep(20)
            assert second.began
            assert second.began - stopped > 12

    virtual_time.run(main())


def test_holder_survives_a_short_outage() -> None:
    async def main() -> None:
        async with run_two_operators(Server()) as (first, second):
            first.cut_off()
            await asyncio.sleep(9)
            first.client.delay = lambda: 0.0
            await asyncio.sleep(60)
            assert first.is_working
            assert not second.is_working

    virtual_time.run(main())


def test_one_hanging_request_does_not_cost_the_lease() -> None:
    async def main() -> None:
        delays = iter([HOUR])
        async with run_two_operators(Server()) as (first, second):
            first.client.delay = lambda: next(delays, 0.0)
            await asyncio.sleep(60)
            assert first.is_working
            assert not second.is_working

    virtual_time.run(main())


def test_late_answer_does_not_extend_the_right_to_write() -> None:
    async def main() -> None:
        async with run_two_operators(Server()) as (first, _):
            delays = iter([0.0, 0.0, 0.0, 2.5])
            # The renewal arrives at once, and its answer late; after that nothing arrives.
            first.client.delay = lambda: next(delays, None)
            begun = now()
            await asyncio.sleep(20)
            (*_, (_, closed)) = first.fence.turns
            assert 10 <= closed - begun <= 12

    virtual_time.run(main())


def test_lease_taken_by_another_is_lost_at_once() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(60)
        assert server.lease
        server.store({**server.lease, "spec": {"holderIdentity": "thief"}})
        stolen = now()
        with pytest.raises(LeaseLost, match="another operator took the lease"):
            await operator.task
        assert operator.ended
        assert operator.ended - stolen <= 2
        assert server.holder == "thief", "it is not ours to release"

    virtual_time.run(main())


def test_deleted_lease_is_created_again_by_its_holder() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(60)
        server.delete()
        await asyncio.sleep(3)
        assert operator.is_working
        assert server.holder == "first"
        await operator.stop()

    virtual_time.run(main())


def test_standby_does_not_take_a_lease_deleted_under_its_holder() -> None:
    async def main() -> None:
        server = Server()
        async with run_two_operators(server) as (first, second):
            server.delete()
            for _ in range(300):
                await asyncio.sleep(0.1)
                assert not second.is_working
            assert first.is_working
            assert server.holder == "first"

    virtual_time.run(main())


def test_error_inside_the_lease_context_is_raised() -> None:
    async def main() -> None:
        server = Server()
        with pytest.raises(ZeroDivisionError):
            async with keep_lease(Client(server), lease("first"), Fence(now)):
                raise ZeroDivisionError
        assert server.holder == ""

    virtual_time.run(main())


def test_shutdown_does_not_wait_for_an_unavailable_api_server() -> None:
    async def main() -> None:
        operator = Operator(Server(), "first")
        await asyncio.sleep(60)
        operator.client.delay = lambda: HOUR
        begun = now()
        await operator.stop()
        assert now() - begun <= 5

    virtual_time.run(main())


async def _start_and_crash(server: Server, name: str) -> None:
    operator = Operator(server, name)
    await asyncio.sleep(5)
    assert operator.is_working
    await operator.crash()
