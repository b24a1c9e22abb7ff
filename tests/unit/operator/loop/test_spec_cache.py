"""A spec is parsed once for each of its generations."""

from typing import Any

import pytest
from pseudoreal_operator.loop.planning_thread import SpecCache
from pydantic import ValidationError

from tests.support.jobs import good_job


def body(uid: str = "one", generation: int = 1, **changes: Any) -> dict[str, Any]:
    job = good_job(**changes)
    job["metadata"] |= {"uid": uid, "generation": generation}
    return job


def test_a_generation_is_read_once_and_its_metadata_each_time() -> None:
    cache = SpecCache()
    first, again = (
        cache.parse(body()),
        cache.parse(body() | {"metadata": body()["metadata"] | {"annotations": {"a": "b"}}}),
    )
    assert again.spec is first.spec
    assert again.metadata.annotations == {"a": "b"}
    changed = cache.parse(body(generation=2, spec__suspend=True))
    assert (changed.spec.suspend, first.spec.suspend) == (True, False)
    assert cache.parse(body(uid="two", spec__suspend=True)).spec.suspend


def test_what_cannot_be_read_is_not_kept() -> None:
    cache = SpecCache()
    for _ in range(2):
        with pytest.raises(ValidationError):
            cache.parse(body(spec__model__layers=0))


def test_the_specs_that_were_used_last_are_kept_within_a_bound() -> None:
    size = len(SpecCache().parse(body()).spec.to_json())
    cache = SpecCache(3 * size)
    known = {uid: cache.parse(body(uid)).spec for uid in "abc"}
    cache.parse(body("a"))
    cache.parse(body("d"))
    kept = [uid for uid, _ in cache._specs]
    assert kept == ["c", "a", "d"]
    assert cache.parse(body("a")).spec is known["a"]
    assert cache._bytes == 3 * size
    assert SpecCache(size - 1).parse(body()).spec is not None
