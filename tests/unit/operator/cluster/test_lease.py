"""Which operator works, as decided by the Lease, in virtual time."""

import asyncio
from typing import Any

import pytest
from pseudoreal_operator.cluster.fence import Fence
from pseudoreal_operator.cluster.lease import LeaseLost, keep_lease

from tests.unit.operator.cluster.support import virtual_time
from tests.unit.operator.cluster.support.fake_leases import Client, Server
from tests.unit.operator.cluster.support.lease_holders import HOUR, Operator, lease, now, two


def test_a_free_lease_is_taken_at_once() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(0.001)
        assert operator.works
        assert server.lease
        spec = server.lease["spec"]
        assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("first", 15)
        assert spec["renewTime"].endswith("Z")
        await operator.stop()

    virtual_time.run(main())


@pytest.mark.parametrize("spec", [{"spec": {"holderIdentity": ""}}, {"spec": {}}, {}])
def test_a_lease_that_nobody_holds_is_taken_at_once(spec: dict[str, Any]) -> None:
    async def main() -> None:
        server = Server()
        server.store({"metadata": {"name": "pseudoreal"}, **spec})
        operator = Operator(server, "first")
        await asyncio.sleep(0.001)
        assert operator.works
        await operator.stop()

    virtual_time.run(main())


def test_a_container_that_restarts_finds_its_own_lease() -> None:
    async def main() -> None:
        server = Server()
        await _begun_and_crashed(server, "same-pod")
        again = Operator(server, "same-pod")
        await asyncio.sleep(0.001)
        assert again.works
        await again.stop()

    virtual_time.run(main())


def test_the_holder_renews() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(100)
        assert operator.works
        assert 45 <= server.writes <= 51
        await operator.stop()

    virtual_time.run(main())


def test_a_holder_that_ends_hands_over_at_once() -> None:
    async def main() -> None:
        server = Server()
        async with two(server) as (first, second):
            ending = now()
            await first.stop()
            await asyncio.sleep(0.001)
            assert second.works
            assert second.began
            assert second.began - ending < 0.001
            assert server.holder == "second"

    virtual_time.run(main())


def test_the_lease_says_since_when_it_is_held_and_how_often_it_changed_hands() -> None:
    async def main() -> None:
        server = Server()
        async with two(server) as (first, second):
            assert server.lease
            held = server.lease["spec"]
            assert held["leaseTransitions"] == 0
            await asyncio.sleep(60)
            assert server.lease["spec"]["acquireTime"] == held["acquireTime"] <= server.lease["spec"]["renewTime"]
            await first.stop()
            await asyncio.sleep(2.1)
            assert second.works
            taken = server.lease["spec"]
            assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("second", 1)
            assert taken["acquireTime"] > held["acquireTime"]

    virtual_time.run(main())


def test_a_holder_that_crashes_is_waited_for() -> None:
    async def main() -> None:
        async with two(Server()) as (first, second):
            await first.crash()
            crashed = now()
            await asyncio.sleep(20)
            assert second.began
            assert 13 <= second.began - crashed <= 15

    virtual_time.run(main())


def test_a_holder_of_another_release_is_waited_for_as_long_as_it_wants() -> None:
    """Earlier releases hold the Lease for half a minute."""

    async def main() -> None:
        server = Server()
        spec = {"holderIdentity": "old", "leaseDurationSeconds": 30}
        server.store({"metadata": {"name": "pseudoreal"}, "spec": spec})
        new = Operator(server, "new")
        await asyncio.sleep(29.9)
        assert not new.works
        await asyncio.sleep(0.2)
        assert new.works
        await new.stop()

    virtual_time.run(main())


def test_the_clocks_of_others_do_not_count() -> None:
    """The holder's clock, and so its renewTime, is years behind, but it renews the Lease."""

    async def main() -> None:
        server = Server()
        async with two(server) as (_, second):
            for _ in range(60):
                assert server.lease
                server.lease["spec"]["renewTime"] = "2001-01-01T00:00:00.000000Z"
                await asyncio.sleep(1)
            assert not second.works

    virtual_time.run(main())


def test_a_holder_that_is_cut_off_writes_no_more_before_the_next_begins() -> None:
    async def main() -> None:
        async with two(Server()) as (first, second):
            first.cut_off()
            begun = now()
            await asyncio.sleep(100)
            assert second.began
            (*_, (_, closed)) = first.fence.turns
            assert closed <= begun + 10
            assert closed + 5 <= second.began
            assert not first.works
            assert not first.ended, "it waits"

    virtual_time.run(main())


def test_after_half_an_hour_without_an_api_server_both_live_and_one_leads_within_20_s() -> None:
    async def main() -> None:
        async with two(Server()) as (first, second):
            for operator in (first, second):
                operator.cut_off()
            await asyncio.sleep(1800)
            assert not first.task.done()
            assert not second.task.done()
            assert not first.works
            assert not second.works
            for operator in (first, second):
                operator.client.delay = lambda: 0.0
            await asyncio.sleep(20)
            assert first.works + second.works == 1

    virtual_time.run(main())


def test_a_holder_survives_an_api_server_that_is_away_for_half_a_minute() -> None:
    """The holder writes nothing in the meantime and then continues, because no other operator could take the Lease."""

    async def main() -> None:
        operator = Operator(Server(), "first")
        await asyncio.sleep(60)
        operator.cut_off()
        await asyncio.sleep(10)
        assert not operator.works
        await asyncio.sleep(20)
        operator.client.delay = lambda: 0.0
        await asyncio.sleep(3)
        assert operator.works
        await operator.stop()

    virtual_time.run(main())


def test_who_was_away_while_another_one_led_ends_though_the_lease_is_free() -> None:
    """The operator's observations from before are stale."""

    async def main() -> None:
        server = Server()
        async with two(server) as (first, second):
            first.cut_off()
            await asyncio.sleep(20)
            assert second.works
            await second.stop()
            assert server.holder == ""
            first.client.delay = lambda: 0.0
            await asyncio.sleep(5)
            assert first.ended
            assert not first.works

    virtual_time.run(main())


def test_a_write_without_an_answer_may_still_arrive_so_the_lease_is_not_handed_over() -> None:
    async def main() -> None:
        server = Server()
        async with two(server) as (first, second):
            with pytest.raises(OSError, match="cut off"), first.fence.writing():
                raise OSError("cut off")
            await first.stop()
            stopped = now()
            assert server.holder == "first"
            await asyncio.sleep(20)
            assert second.began
            assert second.began - stopped > 12

    virtual_time.run(main())


def test_a_holder_survives_a_short_outage() -> None:
    async def main() -> None:
        async with two(Server()) as (first, second):
            first.cut_off()
            await asyncio.sleep(9)
            first.client.delay = lambda: 0.0
            await asyncio.sleep(60)
            assert first.works
            assert not second.works

    virtual_time.run(main())


def test_one_request_that_hangs_does_not_cost_the_lease() -> None:
    async def main() -> None:
        delays = iter([HOUR])
        async with two(Server()) as (first, second):
            first.client.delay = lambda: next(delays, 0.0)
            await asyncio.sleep(60)
            assert first.works
            assert not second.works

    virtual_time.run(main())


def test_a_late_answer_does_not_lengthen_the_lease() -> None:
    async def main() -> None:
        async with two(Server()) as (first, _):
            delays = iter([0.0, 0.0, 0.0, 2.5])
            # The renewal arrives at once, and its answer late; after that nothing arrives.
            first.client.delay = lambda: next(delays, None)
            begun = now()
            await asyncio.sleep(20)
            (*_, (_, closed)) = first.fence.turns
            assert 10 <= closed - begun <= 12

    virtual_time.run(main())


def test_a_lease_that_is_stolen_is_lost_at_once() -> None:
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


def test_a_lease_that_is_deleted_is_made_again() -> None:
    async def main() -> None:
        server = Server()
        operator = Operator(server, "first")
        await asyncio.sleep(60)
        server.delete()
        await asyncio.sleep(3)
        assert operator.works
        assert server.holder == "first"
        await operator.stop()

    virtual_time.run(main())


def test_who_waits_does_not_take_a_lease_that_is_deleted_from_its_holder() -> None:
    async def main() -> None:
        server = Server()
        async with two(server) as (first, second):
            server.delete()
            for _ in range(300):
                await asyncio.sleep(0.1)
                assert not second.works
            assert first.works
            assert server.holder == "first"

    virtual_time.run(main())


def test_an_error_of_the_work_is_what_is_raised() -> None:
    async def main() -> None:
        server = Server()
        with pytest.raises(ZeroDivisionError):
            async with keep_lease(Client(server), lease("first"), Fence(now)):
                raise ZeroDivisionError
        assert server.holder == ""

    virtual_time.run(main())


def test_an_end_does_not_wait_for_an_api_server_that_is_away() -> None:
    async def main() -> None:
        operator = Operator(Server(), "first")
        await asyncio.sleep(60)
        operator.client.delay = lambda: HOUR
        begun = now()
        await operator.stop()
        assert now() - begun <= 5

    virtual_time.run(main())


async def _begun_and_crashed(server: Server, name: str) -> None:
    operator = Operator(server, name)
    await asyncio.sleep(5)
    assert operator.works
    await operator.crash()
