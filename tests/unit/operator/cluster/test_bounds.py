"""No answer of an API server costs more than the bounds allow, and every answer within them is read unchanged."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import ClientPayloadError
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_operator.cluster import bounds
from pseudoreal_operator.cluster.bounds import (
    MOST_BYTES,
    MOST_VALUES,
    Overlong,
    Unreadable,
    guess_name,
    metadata_of,
    page_head_of,
    read_all,
    read_json,
    read_lines,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(), parts),
)


@dataclass
class Stream:
    chunks: list[bytes]

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk


@given(_JSON)
def test_json_within_the_bounds_is_parsed_unchanged(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    assert read_json(text) == json.loads(text)


@pytest.mark.parametrize("depth", [250, 2_000, 10_000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_deep_json_is_rejected_without_a_recursion_error(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(Unreadable) as refused:
        read_json((opening * depth + "1" + closing * depth).encode())
    values = depth * (opening.count("[") + opening.count("{"))
    assert refused.value.reason == (bounds.TOO_DEEP if values <= MOST_VALUES else bounds.TOO_MANY_VALUES)


@pytest.mark.parametrize("value", [b"{}", b'{"a":1}', b"[]", b"1"])
def test_number_of_json_values_is_checked_before_parsing(value: bytes) -> None:
    with pytest.raises(Unreadable) as refused:
        read_json(b"[" + b",".join([value] * (MOST_VALUES + 1)) + b"]")
    assert refused.value.reason == bounds.TOO_MANY_VALUES


@pytest.mark.parametrize("text", [b"", b"<html>", b'{"a":', b'"\\ud800"', b"\xff"])
def test_invalid_json_is_reported_as_no_json(text: bytes) -> None:
    with pytest.raises(Unreadable) as refused:
        read_json(text)
    assert refused.value.reason == bounds.NO_JSON


async def test_answer_is_read_up_to_its_bound_and_no_further() -> None:
    stream = Stream([b"a" * 10, b"b" * 10, b"c" * 10])
    assert await read_all(stream, 30) == b"a" * 10 + b"b" * 10 + b"c" * 10
    with pytest.raises(Unreadable, match="more than 29 bytes"):
        await read_all(stream, 29)


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"") or b"x")), st.data())
async def test_watch_lines_do_not_depend_on_how_the_bytes_are_chunked(lines: list[bytes], data: st.DataObject) -> None:
    whole, chunks = b"".join(line + b"\n" for line in lines) + b"cut off", list[bytes]()
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        chunks, whole = [*chunks, whole[:size]], whole[size:]
    assert [line async for line in read_lines(Stream(chunks))] == [line for line in lines if line.strip()]


@pytest.mark.parametrize("size", [100, 2**16, 3 * MOST_BYTES])
async def test_overlong_line_takes_bounded_memory_and_the_next_line_is_read(size: int) -> None:
    whole = b"before\n" + b"x" * (2 * MOST_BYTES) + b"\nafter\n"
    chunks = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert [line async for line in read_lines(Stream(chunks))] == [b"before", Overlong(b"x" * MOST_BYTES), b"after"]


_POD = (
    b'{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"n","uid":"u",'
    b'"resourceVersion":"7","labels":{"a":"b"},"managedFields":' + b'[{"f:a":' * 3000
)


@pytest.mark.parametrize(
    "head",
    [
        _POD,
        _POD.replace(b'{"type":"ADDED","object":', b""),
        b'{"kind":"PartialObjectMetadataList","metadata":{"resourceVersion":"9"},"items":['
        + _POD.replace(b'{"type":"ADDED","object":', b""),
    ],
)
def test_metadata_of_an_object_of_any_depth_is_read(head: bytes) -> None:
    metadata = metadata_of(head)
    assert metadata == {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}}


@pytest.mark.parametrize(
    "opening", ["", '{"type":"MODIFIED","object":', '{"metadata":{"resourceVersion":"9"},"items":[']
)
def test_name_and_version_of_an_object_with_too_many_commas_in_an_annotation_are_read(opening: str) -> None:
    labels, annotations = {"pseudoreal.dev/job-name": "a"}, {"text": "," * (MOST_VALUES + 50_000)}
    known = {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": labels}
    metadata = {**known, "annotations": annotations}
    head = opening + json.dumps({"kind": "Pod", "metadata": metadata, "spec": {}}, separators=(",", ":"))
    found = metadata_of(head.encode())
    assert found is not None
    assert {key: found[key] for key in known} == known


@pytest.mark.parametrize(
    "head", [b"", b"<html>", b"[]", b'{"metadata":3}', b'{"metadata":{"name":3}}', b'{"items":[]}']
)
def test_metadata_without_a_name_is_none(head: bytes) -> None:
    assert metadata_of(head) is None


def test_continue_token_of_a_list_is_read_even_if_its_items_are_unreadable() -> None:
    head = b'{"kind":"List","metadata":{"resourceVersion":"9","continue":"x"},"items":[' + b"[" * 5000
    assert page_head_of(head) == {"resourceVersion": "9", "continue": "x"}
    for answer in (b"<html>", b'{"metadata":{}}', b'{"items":[]}'):
        with pytest.raises(ClientPayloadError):
            page_head_of(answer)


def test_name_of_a_custom_resource_is_guessed_after_its_managed_fields() -> None:
    spoof = b'{"metadata":{"annotations":{"name":"not-me","namespace":"alice"},'
    deep = (
        spoof + b'"managedFields":[' + b'{"f:a":' * 3000 + b"1" + b"}" * 3000 + b'],"name":"me","namespace":"mallory"}}'
    )
    assert guess_name(deep) == ("mallory", "me")
    assert guess_name(b"{}") is None
