"""Lists that contain an object too large or too deeply nested to read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from click.testing import CliRunner
from kubernetes.client import ApiClient
from pseudoreal import api as module
from pseudoreal import client as client_module
from pseudoreal.api import Api
from pseudoreal.connect import Connection
from pseudoreal.errors import Unreadable
from pseudoreal_api.base import KIND
from pseudoreal_trainer.cli.command import main

from tests.support.jobs import good_job

Json = dict[str, Any]
DEPTH = 5000


def deep(name: str) -> str:
    return json.dumps(stored(name)).replace('"layers": 8', '"layers": ' + '{"a":' * DEPTH + "1" + "}" * DEPTH)


def stored(name: str) -> Json:
    body = good_job(name)
    body["metadata"] |= {"namespace": "team", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return body


@dataclass
class Answer:
    data: bytes
    status: int = 200

    def stream(self) -> Iterator[bytes]:
        for begin in range(0, len(self.data), 4096):
            yield self.data[begin : begin + 4096]

    def close(self) -> None: ...


@dataclass
class Server:
    """Stand-in for the client of an API server with these objects, given as JSON."""

    objects: list[str]
    asked: list[Json] = field(default_factory=list)

    @property
    def configuration(self) -> Any:
        return type("Configuration", (), {"host": "https://cluster"})

    def param_serialize(self, method: str, resource_path: str, **request: Any) -> tuple[Any, ...]:
        return method, resource_path, request

    def call_api(self, _method: str, path: str, request: Json, **_: Any) -> Any:
        self.asked.append(request)
        if not path.endswith("pseudorealjobs"):
            (found,) = (each for each in self.objects if f'"{path.rpartition("/")[2]}"' in each)
            return type("Reply", (), {"response": Answer(found.encode())})
        query = dict(request["query_params"])
        begin = int(query.get("continue") or 0)
        page = self.objects[begin : begin + int(query["limit"])]
        if "PartialObjectMetadata" in request["header_params"]["Accept"]:
            page = [f'{{"metadata": {{"name": "{name}", "namespace": "team"}}}}' for name in map(name_of, page)]
        end = begin + int(query["limit"])
        following = str(end) if end < len(self.objects) else ""
        text = f'{{"metadata": {{"continue": "{following}"}}, "items": [{",".join(page)}]}}'
        return type("Reply", (), {"response": Answer(text.encode())})


def name_of(text: str) -> str:
    return text.split('"metadata": {"name": "')[1].split('"')[0]


def listed(server: Server) -> tuple[list[str], list[str]]:
    """Return the names of the listed objects, and the warnings about others."""
    warnings: list[str] = []
    found = Api(cast(ApiClient, server), warnings.append).each(KIND, None)
    return [body["metadata"]["name"] for body in found], warnings


@pytest.mark.parametrize("place", [0, 1, 499, 500, 700, 999])
def test_a_list_with_one_deep_object_has_all_others_and_a_warning(place: int) -> None:
    objects = [json.dumps({"metadata": {"name": f"job-{number}", "namespace": "team"}}) for number in range(1000)]
    objects[place] = f'{{"metadata": {{"name": "poison"}}, "spec": {"[" * DEPTH + "]" * DEPTH}}}'
    server = Server(objects)
    found, warnings = listed(server)
    assert found == [f"job-{number}" for number in range(1000) if number != place]
    (warning,) = warnings
    assert warning.startswith(
        "poison in namespace team, one of the pseudorealjobs, is left out: it is no JSON, or nested"
    )
    assert "kubectl get pseudorealjobs poison -n team" in warning
    assert len(server.asked) < 30


def test_a_list_of_large_objects_has_all_but_a_too_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)
    sizes = {"a": 100, "b": 15_000, "c": 15_000, "d": 30_000, "e": 100}
    objects = [json.dumps({"metadata": {"name": name}, "spec": "x" * size}) for name, size in sizes.items()]
    found, warnings = listed(Server(objects))
    assert found == ["a", "b", "c", "e"]
    assert [warning.split()[0] for warning in warnings] == ["d"]


def test_an_unreadable_job_asked_for_by_name_is_an_error() -> None:
    with pytest.raises(
        Unreadable, match=r"PseudoRealJob poison in namespace team cannot be read: it is no JSON, or nested"
    ):
        Api(cast(ApiClient, Server([deep("poison")])), print).job("team", "poison")


def test_get_lists_readable_jobs_and_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = stored("newer") | {"status": {"phases": "of another release"}}
    server = Server([json.dumps(stored("one")), deep("poison"), json.dumps(newer), json.dumps(stored("two"))])
    said: list[str] = []
    connection = Connection(Api(cast(ApiClient, server), said.append), "team")
    monkeypatch.setattr(client_module, "connect", lambda *_: connection)
    done = CliRunner().invoke(main, ["get", "-A"])
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == ["one", "two"]
    assert "job newer in namespace team is left out" in done.stderr
    assert [sentence.split()[0] for sentence in said] == ["poison"]
