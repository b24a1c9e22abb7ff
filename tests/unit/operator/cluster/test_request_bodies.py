"""Request bodies, as parsers of YAML and of JSON read them."""

import json
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_operator.cluster.login import encode_body, send_utf8

TEXTS = st.text(st.characters(exclude_categories=[]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


def replace_surrogates(value: Any) -> Any:
    """Return the value with the replacement character in place of each lone surrogate."""
    if isinstance(value, str):
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in value)
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return value


CHARACTERS = [
    *("GLHF! 🏖️", "\ud83c", "\udfd6\ud83c", "a\x00b\x1b[31m\x7f\x85\x9f"),
    *("one \u2028 two\u2029", "one \x85 two", "\u200f\u202e", "\ufeff\uffff", "\\ud83c\\udfd6"),
]
LIKE_YAML = ["!!python/object x", "&a *a", "---\n...\n", "%YAML 1.2", "- x: [", "'\"\\", "yes", "<<", "~"]


@pytest.mark.parametrize("text", CHARACTERS + LIKE_YAML)
def test_request_body_text_is_the_same_in_json_and_yaml(text: str) -> None:
    body = encode_body({"status": {"message": text}})
    meant = {"status": {"message": replace_surrogates(text)}}
    assert yaml.safe_load(body) == meant
    assert json.loads(body) == meant


@given(VALUES)
def test_request_body_values_are_the_same_in_json_and_yaml(value: Any) -> None:
    body = encode_body(value)
    assert yaml.safe_load(body) == json.loads(body) == replace_surrogates(value)


def test_number_that_json_does_not_have_is_rejected() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        encode_body({"loss": float("nan")})


@pytest.mark.parametrize("kind", ["application/json", "application/merge-patch+json", "application/apply-patch+yaml"])
async def test_escaped_request_body_is_sent_as_utf8(kind: str) -> None:
    received: list[tuple[str, bytes]] = []

    async def answer(request: web.Request) -> web.Response:
        received.append((request.headers["Content-Type"], await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}/".format(*runner.addresses[0])
    try:
        async with ClientSession(middlewares=(send_utf8,)) as session:
            escaped = json.dumps({"message": "🏖️ \ud800"})
            await session.patch(url, data=escaped, headers={"Content-Type": kind})
            await session.get(url, headers={"Content-Type": kind})
    finally:
        await runner.cleanup()
    assert received == [(kind, '{"message": "🏖️ \ufffd"}'.encode()), (kind, b"")]
