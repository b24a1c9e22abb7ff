"""The origin of a phase is the same on every rank."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.origin import Complete, Continued, FreshStart, Origin, Resumed, find_origin
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

OLD = "tiny-11111111"


@dataclass
class First:
    """Rank 0 of two; it records its broadcasts and the results of collectives."""

    said: list[tuple[str, Any]] = field(default_factory=list)
    rank = 0
    world = 2
    is_first = True

    def from_first(self, value: int) -> int:
        self.said.append(("from_first", value))
        return value

    def digest_from_first(self, digest: str) -> str:
        self.said.append(("digest_from_first", digest))
        return digest

    def total(self, value: int) -> int:
        self.said.append(("total", value))
        return value


@dataclass
class Second:
    """Rank 1 of two. It receives the broadcasts of rank 0, and must request them in the same order."""

    heard: deque[tuple[str, Any]]
    rank = 1
    world = 2
    is_first = False

    def _next(self, method: str) -> Any:
        said, value = self.heard.popleft()
        assert said == method, f"rank 0 calls {said} where rank 1 calls {method}"
        return value

    def from_first(self, value: int) -> int:
        assert value == 0
        return int(self._next("from_first"))

    def digest_from_first(self, digest: str) -> str:
        assert digest == ""
        return str(self._next("digest_from_first"))

    def total(self, value: int) -> int:
        return value + int(self._next("total"))


def _find(config: PhaseConfig) -> Origin | Complete:
    """Return the origin found by both ranks, one after the other."""
    first = First()
    found = find_origin(config, store_of(config), first)
    second = Second(deque(first.said))
    assert find_origin(config, store_of(config), second) == found
    assert not second.heard
    return found


def _stop_after(steps: int) -> Callable[[], bool]:
    made = iter(range(100))
    return lambda: next(made) >= steps - 1


def _spoil(config: PhaseConfig, name: str, content: bytes | None) -> None:
    """Replace the content of the checkpoint's moments, which rank 0 verifies. None: other content of the same size."""
    file = Path(config.work_directory) / "checkpoints" / name / "moments-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size) if content is None else content)


def test_a_phase_that_its_tokens_end_before_its_last_step_is_complete(
    job_body: Any, config: Any, delink_of: Any, train: Any
) -> None:
    """The phase before ended early, so the token limit of this phase is reached before its last step."""
    first, second = job_body["spec"]["phases"]
    first["until"] = {"step": 12, "validationLoss": "5.0"}
    second |= {"until": {"tokens": 15 * 6 * 16}, "batch": {"sequences": 12}}
    assert train(config(0)).step == 4
    delink(delink_of(1))
    assert (train(config(1)).step, config(1).phase_steps) == (10, 14)
    assert isinstance(_find(config(1)), Complete)


def test_the_first_phase_begins_anew_and_a_later_one_does_not(config: Any) -> None:
    assert _find(config(0)) == FreshStart()
    with pytest.raises(
        TrainingError, match=r"phase real has no checkpoint .* the delink from the phase before has not"
    ):
        find_origin(config(1), store_of(config(1)), First())


def test_a_phase_resumes_until_it_is_complete(config: Any, train: Any) -> None:
    train(config(0), _stop_after(3))
    stopped = _find(config(0))
    assert isinstance(stopped, Resumed)
    assert stopped.checkpoint.manifest.name == "pseudo-00000003"
    train(config(0))
    complete = _find(config(0))
    assert isinstance(complete, Complete)
    assert complete.checkpoint.manifest.name == "pseudo-00000006"


def test_phase_resumes_from_the_checkpoint_of_its_delink(config: Any, train: Any, delink_of: Any) -> None:
    train(config(0))
    delink(delink_of(1))
    found = _find(config(1))
    assert isinstance(found, Resumed)
    assert found.checkpoint.manifest.delinked
    assert found.checkpoint.manifest.name == "real-00000006"


@pytest.mark.parametrize("content", [None, b"shorter"], ids=["other bytes", "another size"])
def test_corrupt_checkpoints_are_passed_over_by_all_ranks(content: bytes | None, config: Any, train: Any) -> None:
    train(config(0))
    _spoil(config(0), "pseudo-00000006", content)
    found = _find(config(0))
    assert isinstance(found, Resumed)
    assert found.checkpoint.manifest.step == 5
    _spoil(config(0), "pseudo-00000005", content)
    first = First()
    says = "every checkpoint of phase pseudo in .* is corrupt"
    with pytest.raises(TrainingError, match=f"{says}: pseudo-00000006, pseudo-00000005;"):
        find_origin(config(0), store_of(config(0)), first)
    with pytest.raises(TrainingError, match=f"{says};"):
        find_origin(config(0), store_of(config(0)), Second(deque(first.said)))


def test_another_job_is_continued_until_there_is_a_checkpoint_of_its_own(
    job_body: dict[str, Any], config: Any, train: Any
) -> None:
    train(config(0, OLD), _stop_after(3))
    job_body["spec"]["checkpoint"]["continueFrom"] = OLD
    job_body["metadata"]["uid"] = "22222222-3333"
    new = config(0, "tiny-22222222")
    found = _find(new)
    assert isinstance(found, Continued)
    assert found.checkpoint.manifest.step == 3
    train(new, _stop_after(1))
    assert isinstance(_find(new), Resumed)
    job_body["spec"]["model"]["hiddenSize"] = 32
    with pytest.raises(InvalidJobError, match=r"spec.model is .* make them the same"):
        find_origin(third := config(0, "tiny-33333333"), store_of(third), First())
