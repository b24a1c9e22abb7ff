"""Two operators never hold the Lease at once, whatever happens to them and to their messages."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import pytest
from pseudoreal_operator.cluster.lease import LeaseLost

from tests.support.depth import DEPTH
from tests.unit.operator.cluster.support import virtual_time
from tests.unit.operator.cluster.support.fake_leases import Server
from tests.unit.operator.cluster.support.lease_holders import Operator


@pytest.mark.parametrize("number", range(DEPTH.of(25, 1000)))
def test_lease_is_never_held_by_two_operators(number: int) -> None:
    """Operators start, are cut off, come back and crash, and their messages are lost or delayed."""
    virtual_time.run(_run_history(DEPTH.chance(f"history {number}")))


async def _run_history(chance: random.Random) -> None:
    server, everybody = Server(), list[Operator]()
    for number in range(12):
        everybody.append(Operator(server, f"operator-{number % 5}-{number}", _make_network(chance)))
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(chance.choice((0.1, 1, 3)))
            assert sum(one.is_working for one in everybody) <= 1
        alive = [one for one in everybody if not one.task.done()]
        for one in alive[: max(0, len(alive) - 3)]:
            await _end(one, chance)
    for one in everybody:
        await _end(one, chance)
    _check_turns(everybody)


def _make_network(chance: random.Random) -> Callable[[], float | None]:
    """Return the delays of a network that is good, bad or away, and that sometimes changes."""
    state = [chance.random()]

    def delay() -> float | None:
        if chance.random() < 0.1:
            state[0] = chance.random()
        if state[0] > 0.9 or chance.random() < 0.05:
            return None
        return chance.choice((0.0, 0.1, 1.0)) if state[0] < 0.6 else chance.choice((0.5, 3.0, 20.0, 60.0))

    return delay


async def _end(operator: Operator, chance: random.Random) -> None:
    with suppress(LeaseLost):
        await chance.choice((operator.stop, operator.crash))()


def _check_turns(everybody: list[Operator]) -> None:
    turns = sorted((*turn, one.name) for one in everybody for turn in one.fence.turns)
    assert len({name for _, _, name in turns}) > 1, "several of them led"
    for (_, ended, one), (began, _, other) in pairwise(turns):
        assert one == other or ended <= began
