"""A side thread reports the collective that it waits for, also to a thread that waits for the side thread."""

from pseudoreal_trainer.runtime.heartbeat import SideThread


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_thread_that_waits_for_another_one_waits_for_other_ranks_while_that_one_does() -> None:
    clock = Clock()
    reductions, updates = SideThread("reduces gradients", clock), SideThread("updates", clock)
    with updates.waiting_behind(reductions):
        clock.now += 1
        assert updates.waits_for()[0] is None
        with reductions.waiting("reduces unit 1"):
            clock.now += 20
            assert updates.waits_for() == ("reduces unit 1", 101.0)
            assert updates.waited_seconds() == 20
        clock.now += 4
    assert updates.waits_for() == (None, 125.0)
    assert updates.waited_seconds() == reductions.waited_seconds() == 20
