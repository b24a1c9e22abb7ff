"""What ends the wait of a job's loop, and what does not."""

import asyncio

import pytest
from pseudoreal_operator.controller.wakeups import Wakeups

KEY = "uid"


async def test_a_wake_up_during_a_pass_is_not_lost() -> None:
    wakeups = Wakeups()
    wakeups.add(KEY)
    wakeups.wake(KEY)
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
    # It was for one wait only.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.wait(KEY, None), 0.01)


async def test_the_echo_of_our_own_status_wakes_nobody() -> None:
    wakeups = Wakeups()
    wakeups.add(KEY)
    wakeups.wake_on_change(KEY, (1, ""))
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
    wakeups.wake_on_change(KEY, (1, ""))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.wait(KEY, None), 0.01)
    wakeups.wake_on_change(KEY, (2, ""))
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
