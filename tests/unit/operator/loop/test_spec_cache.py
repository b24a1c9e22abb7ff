"""A spec is parsed once for each of its generations."""

from typing import Any

import pytest
from pseudoreal_operator.loop.planning_thread import Specs
from pydantic import ValidationError

from tests.support.jobs import good_job


def body(uid: str = "one", generation: int = 1, **changes: Any) -> dict[str, Any]:
    job = good_job(**changes)
    job["metadata"] |= {"uid": uid, "generation": generation}
    return job


def test_a_generation_is_read_once_and_its_metadata_each_time() -> None:
    specs = Specs()
    first, again = specs.job(body()), specs.job(body() | {"metadata": body()["metadata"] | {"annotations": {"a": "b"}}})
    assert again.spec is first.spec
    assert again.metadata.annotations == {"a": "b"}
    changed = specs.job(body(generation=2, spec__suspend=True))
    assert (changed.spec.suspend, first.spec.suspend) == (True, False)
    assert specs.job(body(uid="two", spec__suspend=True)).spec.suspend


def test_what_cannot_be_read_is_not_kept() -> None:
    specs = Specs()
    for _ in range(2):
        with pytest.raises(ValidationError):
            specs.job(body(spec__model__layers=0))


def test_the_specs_that_were_used_last_are_kept_within_a_bound() -> None:
    size = len(Specs().job(body()).spec.to_json())
    specs = Specs(3 * size)
    known = {uid: specs.job(body(uid)).spec for uid in "abc"}
    specs.job(body("a"))
    specs.job(body("d"))
    kept = [uid for uid, _ in specs._kept]
    assert kept == ["c", "a", "d"]
    assert specs.job(body("a")).spec is known["a"]
    assert specs._bytes == 3 * size
    assert Specs(size - 1).job(body()).spec is not None
