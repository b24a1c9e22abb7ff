"""No answer of an API server costs more than the bounds allow, and every answer within them is read unchanged."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

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
    metadata_of,
    name_of_unreadable,
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


_FORGED = {"managedFields": "a", "name": "theirs", "namespace": "alice"}
_MANAGED = [{"manager": "kubectl", "fieldsV1": {"f:metadata": {"name": "theirs", "namespace": "alice"}}}]
_SHOUTED = '"},"name":"theirs","namespace":"alice","x":{"y":"'


def job_line(annotations: Any = None, managed: Any = None, spec: bytes = b"[]") -> bytes:
    """Return a change of a job as a line of a watch, with its fields in the order that the API server writes."""
    metadata: dict[str, Any] = {"annotations": annotations or {}, "labels": _FORGED, "managedFields": managed or []}
    metadata |= {"name": "mine", "namespace": "mallory", "ownerReferences": [{"name": "theirs"}], "uid": "u"}
    change = {"type": "MODIFIED", "object": {"kind": "PseudoRealJob", "metadata": metadata}}
    return json.dumps(change, separators=(",", ":")).encode()[:-2] + b',"spec":' + spec + b"}}"


@pytest.mark.parametrize(
    "line",
    [
        job_line(_FORGED | {"pad": "," * 110_000}),
        job_line({"a": json.dumps(_FORGED), "b": _SHOUTED, "c": "\\", "d": "," * 110_000}),
        job_line({"a\\": "\\", "\\name": _SHOUTED}, _MANAGED),
        job_line(_FORGED, spec=b'{"f:a":' * 3000 + b"1" + b"}" * 3000),
        job_line().replace(b'"managedFields":[]', b'"managedFields":[' + b'{"f:a":' * 3000 + b"1" + b"}" * 3000 + b"]"),
        job_line()[:-50],
    ],
    ids=["annotations", "texts", "escapes", "deep spec", "deep managed fields", "cut off"],
)
def test_name_of_an_unreadable_job_is_its_own_whatever_its_owner_writes(line: bytes) -> None:
    assert name_of_unreadable(line) == ("mallory", "mine")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"}" * 50 + b'{"name":"a"}',
        b'{"metadata":{"name":"mine","namespace":"mallory"}}',
        job_line({"b": _SHOUTED * 10})[:200],
        job_line({f"a{number}": "" for number in range(60_000)}),
        job_line().replace(b'"mine"', b'"../mine"'),
        job_line().replace(b'"mallory"', b'"x.1"'),
        job_line().replace(b'"mine"', b'{"name":"mine"}'),
    ],
    ids=["nothing", "empty", "closed", "no change", "cut in a text", "many fields", "path", "dot", "object"],
)
def test_name_that_the_api_server_does_not_say_is_none(line: bytes) -> None:
    assert name_of_unreadable(line) is None
