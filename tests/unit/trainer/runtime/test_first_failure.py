"""Only the first failure of a rank counts, and it ends the rank."""

import threading

import pytest
from pseudoreal_trainer.runtime.first_failure import FirstFailure

PATIENCE = 60.0


def test_no_work_begins_after_a_failure_and_all_threads_raise_the_first_one() -> None:
    failure, ran = FirstFailure(), []
    failure.check()
    with pytest.raises(OSError, match="first"), failure.noticed():
        raise OSError("first")
    with pytest.raises(OSError, match="first"), failure.noticed():
        ran.append(1)
    failure.add(OSError("second"))
    with pytest.raises(OSError, match="first"):
        failure.check()
    assert not ran


def test_the_thread_that_fails_first_ends_the_process_and_others_wait_for_that() -> None:
    failure, ends, may_end = FirstFailure(), threading.Event(), threading.Event()
    ended: list[str] = []

    def end(error: BaseException) -> None:
        ended.append(str(error))
        ends.set()
        assert may_end.wait(PATIENCE)

    failure.ends_with(end)
    first = threading.Thread(target=lambda: failure.add(OSError("first")))
    first.start()
    assert ends.wait(PATIENCE)
    second = threading.Thread(target=lambda: failure.add(OSError("second")))
    second.start()
    assert second.is_alive()
    may_end.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert ended == ["first"]
