"""manifest.json is written and read tensor by tensor, and is byte for byte pydantic's output for the whole manifest."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_trainer.checkpoint.manifest import FileDigest, Head, Link, Manifest, Piece, StoredTensor
from pseudoreal_trainer.checkpoint.manifest_text import head_in, is_end, manifest_in, manifest_text
from pydantic import ValidationError

from tests.unit.trainer.checkpoint.support.by_hand import manifest_of

_PIECES = st.lists(st.builds(Piece, file=st.integers(0, 2000), begin=st.integers(0), end=st.integers(0)), max_size=3)
_TENSORS = st.builds(
    StoredTensor, shape=st.tuples(st.integers(0, 9)), dtype=st.sampled_from(["float32", "a\\b"]), pieces=_PIECES
)
# Names that nobody writes: they show that no name, and no text before the tensors, is taken for a mark.
_NAMES = st.one_of(
    st.text(max_size=9), st.sampled_from(["blocks.0.ffn.up.weight", '": {', "tensors", '\n "tensors": {', "\\", "}"])
)
_SHARED = st.dictionaries(_NAMES, st.integers(0, 2), max_size=6)


@st.composite
def _manifests(draw: st.DrawFn) -> Manifest:
    """Manifests in which some tensors share their pieces, and others have equal ones."""
    few = draw(st.lists(_TENSORS, min_size=3, max_size=3))
    tensors = {name: few[number] for name, number in draw(_SHARED).items()}
    digests = st.builds(FileDigest, sha256=st.just("0" * 64), size=st.integers(0, 2**60))
    names = st.from_regex(r"\A(weights|moments)-[0-9]{5}\.safetensors\Z")
    divisors = draw(st.dictionaries(_NAMES, st.just([1.0]), max_size=2))
    link = Link(
        folder="a-00000000",
        blocks=[0],
        first_moment_divisor=1.5,
        second_moment_divisor=2,
        second_moment_divisors=divisors,
    )
    return manifest_of(1).revised(
        tensors=tensors,
        files=draw(st.dictionaries(names, digests, max_size=3)),
        imported=draw(st.none() | st.dictionaries(_NAMES, _NAMES | st.integers(), max_size=3)),
        link=draw(st.sampled_from([None, link])),
        loss=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    )


def _whole(manifest: Manifest) -> str:
    return manifest.to_json(indent=1)


@given(_manifests())
def test_the_text_is_that_of_the_whole_manifest(manifest: Manifest) -> None:
    text = manifest_text(manifest)
    assert text == _whole(manifest)
    found = manifest_in(text.encode())
    assert found == Manifest.model_validate_json(text)
    assert found == manifest
    assert head_in(text.encode()) == manifest.head
    assert is_end(text.encode())


@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"indent": 1, "sort_keys": True}, {"separators": (",", ":")}])
def test_a_manifest_that_is_written_in_another_way_is_read_whole(how: Any) -> None:
    manifest = _large()
    text = json.dumps(json.loads(manifest_text(manifest)), **how).encode()
    assert manifest_in(text) == manifest
    try:
        assert head_in(text) is None
    except ValidationError:
        assert "sort_keys" in how, "fields of the head are missing, so it is read whole"


def _large() -> Manifest:
    pieces = [Piece(file=file, begin=file, end=file + 1) for file in range(40)]
    tensor = StoredTensor(shape=(40,), dtype="float32", pieces=pieces)
    tensors = {f"blocks.{block}.ffn.up.weight": tensor for block in range(3)}
    files = {f"weights-{rank:05d}.safetensors": FileDigest(sha256="0" * 64, size=4) for rank in range(40)}
    return manifest_of(1).revised(tensors=tensors, files=files)


def test_a_manifest_that_was_cut_off_is_none() -> None:
    text = manifest_text(_large()).encode()
    for count in range(len(text)):
        with pytest.raises(ValidationError):
            manifest_in(text[:count])
        assert not is_end(text[:count]), "so its head is not believed"


def _changes(text: bytes) -> Iterator[bytes]:
    for begin in range(0, len(text), 17):
        for new in (b"", b'"', b"{", b"}", b",", b"\n", b"\n  }", b"0", b"\xff"):
            yield text[:begin] + new + text[begin + 1 :]


def test_a_manifest_that_was_changed_anywhere_is_read_as_the_whole_one_would_be() -> None:
    text = manifest_text(_large()).encode()
    text = text[: text.index(b'"begin": 3,')] + text[text.rindex(b'"begin": 37,') :]
    assert Manifest.model_validate_json(text)
    for changed in _changes(text):
        try:
            expected = Manifest.model_validate_json(changed)
        except ValidationError:
            with pytest.raises(ValidationError):
                manifest_in(changed)
        else:
            assert manifest_in(changed) == expected


def test_tensors_with_the_same_pieces_are_parsed_once() -> None:
    found = manifest_in(manifest_text(_large()).encode())
    assert len({id(tensor) for tensor in found.tensors.values()}) == 1


def test_a_head_has_all_but_tensors_and_files() -> None:
    assert [*Manifest.model_fields] == [*Head.model_fields, "tensors", "files"], "they are written last"


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="pseudo-00000001 has a number that is not finite"):
        manifest_text(manifest_of(1).model_copy(update={"loss": float("inf")}))
