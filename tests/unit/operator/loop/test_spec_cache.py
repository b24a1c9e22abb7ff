"""A spec is parsed once for each of its generations."""

from typing import Any

import pytest
from pseudoreal_operator.loop.planning_thread import SpecCache
from pydantic import ValidationError

from tests.support.jobs import good_job


def make_body(uid: str = "one", generation: int = 1, **changes: Any) -> dict[str, Any]:
    job = good_job(**changes)
    job["metadata"] |= {"uid": uid, "generation": generation}
    return job


def test_spec_is_parsed_once_per_generation_and_metadata_each_time() -> None:
    cache = SpecCache()
    first, again = (
        cache.parse(make_body()),
        cache.parse(make_body() | {"metadata": make_body()["metadata"] | {"annotations": {"a": "b"}}}),
    )
    assert again.spec is first.spec
    assert again.metadata.annotations == {"a": "b"}
    changed = cache.parse(make_body(generation=2, spec__suspend=True))
    assert (changed.spec.suspend, first.spec.suspend) == (True, False)
    assert cache.parse(make_body(uid="two", spec__suspend=True)).spec.suspend


def test_invalid_spec_is_not_cached() -> None:
    cache = SpecCache()
    for _ in range(2):
        with pytest.raises(ValidationError):
            cache.parse(make_body(spec__model__layers=0))


def test_spec_cache_keeps_the_most_recently_used_specs_within_its_bound() -> None:
    size = len(SpecCache().parse(make_body()).spec.to_json())
    cache = SpecCache(3 * size)
    known = {uid: cache.parse(make_body(uid)).spec for uid in "abc"}
    cache.parse(make_body("a"))
    cache.parse(make_body("d"))
    kept = [uid for uid, *_ in cache._specs]
    assert kept == ["c", "a", "d"]
    assert cache.parse(make_body("a")).spec is known["a"]
    assert cache._bytes == 3 * size
    assert SpecCache(size - 1).parse(make_body()).spec is not None
