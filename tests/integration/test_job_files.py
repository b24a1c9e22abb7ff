"""Job files as `pseudoreal validate`, `plan` and `run` read them, and as kubectl and the API server do: both accept the
same texts, and find the same values in them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from pseudoreal_api.base import GROUP, PLURAL, VERSION
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.cli.common import CommandError
from pseudoreal_trainer.cli.job_file import parse_job

from tests.support.jobs import example_jobs
from tests.support.kubectl import Kubectl

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("admin")]
Json = dict[str, Any]

JOB = """\
apiVersion: pseudoreal.dev/v1alpha1
kind: PseudoRealJob
metadata: {name: NAME, labels: {team: LABEL}, annotations: {note: NOTE}}
spec:
  suspend: SUSPEND
  model: {layers: 2, hiddenSize: 32, sequenceLength: 64, attention: {heads: 2}, feedForward: {size: 64}}
  data: {path: /data}
  optimizer: {learningRate: RATE}
  phases:
  - name: p
    until: {step: STEP}
    batch: {sequences: 2}
    resources: {limits: {memory: MEMORY}}
  pod:
    env: [{name: A, value: VALUE}]
    template: {spec: {nodeSelector: {a: SELECTOR}, terminationGracePeriodSeconds: GRACE}}
"""
PLACES = {"LABEL": "a", "NOTE": "a", "SUSPEND": "false", "RATE": "'3e-4'", "STEP": "10", "MEMORY": "1Gi"}
PLACES |= {"VALUE": "a", "SELECTOR": "a", "GRACE": "30"}
"""Place in the job -> scalar that suits it."""
# What YAML 1.1, YAML 1.2 and the parsers of Python and Go read differently.
NUMBERS = ["10", "+10", "-10", "1e1", "1.0", "10.5", "0o17", "017", "0x1F", "0b11", "1_000", "12:30", "1:2:3", "1e400"]
NUMBERS += [
    ".5",
    "10.",
    "1E1",
    "1e+1",
    "3e-4",
    ".inf",
    "-.inf",
    ".nan",
    "0x_1",
    "08",
    "_1",
    "-0b11",
    "+",
    "0o",
    "1_0.5",
]
NUMBERS += [
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "99999999999999999999",
    "1e20",
    "1e21",
]
WORDS = ["yes", "no", "on", "off", "y", "n", "True", "TRUE", "tRUE", "null", "~", "Null", "", "2030-01-01"]
WORDS += ["2030-01-01T00:00:00Z", "<<", "=", "'10'", '"1Gi"', "!!str 10", "!!int '10'", "!!float 10", "!custom 10"]
WORDS += ["!!bool yes", "!!binary YQ==", "!!null ''", "!!timestamp a", "[a]", "{a: b}", "|-\n      10", "'a\\n'"]
WORDS += ['"a\\u00e9"', "&x a", "!!int x", "!!set {a}"]


def job_text(**scalars: str) -> str:
    """Return a job file with these scalars in their places."""
    text = JOB
    for place, value in (PLACES | scalars).items():
        text = text.replace(place, value)
    return text


BATCH = "    batch: {sequences: 2}\n"
GOOD = job_text()
WHOLE = {
    "byte order mark": "\ufeff" + GOOD,
    "anchor of a map": GOOD.replace(BATCH, "    batch: &b {sequences: 2}\n").replace(
        "  pod:\n", "  - {name: q, until: {step: 20}, batch: *b}\n  pod:\n"
    ),
    "merge key": GOOD.replace(BATCH, "    batch: {<<: {sequences: 3}, microBatches: 1}\n"),
    "merge key that is overridden": GOOD.replace(BATCH, "    batch: {<<: {sequences: 3}, sequences: 2}\n"),
    "unknown alias": job_text(VALUE="*x"),
    "end of a document": GOOD + "...\n",
    "start of a document": "---\n" + GOOD,
    "empty documents": "---\n---\n" + GOOD + "---\n",
    "document of a comment": "# c\n---\n" + GOOD,
    "document of a null": "null\n---\n" + GOOD,
    "directive of YAML 1.1": "%YAML 1.1\n---\n" + GOOD,
    "directive of YAML 1.2": "%YAML 1.2\n---\n" + GOOD,
    "directive of tags": "%TAG ! tag:x,2000:\n---\n" + GOOD,
    "line ends of Windows": GOOD.replace("\n", "\r\n"),
    "tab as indent": GOOD.replace("  suspend:", "\tsuspend:"),
    **{f"key {key}": GOOD.replace("team: a", f"{key}: a") for key in ("1", "yes", "~", "1.5", "[a]", "2030-01-01")},
    "unknown field": GOOD.replace("suspend:", "suspended:"),
    "unknown field beside the spec": GOOD + "specs: {}\n",
    "unknown field of metadata": GOOD.replace("labels:", "lables:"),
    "unknown field that is null": GOOD.replace("suspend: false", "suspended: null"),
    "case of a field": GOOD.replace("suspend:", "Suspend:"),
    "null in place of a list": GOOD.replace("    env: [{name: A, value: a}]\n", "    env: null\n"),
    "null in place of an object": GOOD.replace("  data: {path: /data}", "  delink: null\n  data: {path: /data}"),
    "null in a list": GOOD.replace("[{name: A, value: a}]", "[null]"),
    "JSON": json.dumps({"a": 1}),
    "no document": "",
    "control character": job_text(VALUE='"a\x07"'),
    "unicode": job_text(VALUE="é"),
    "text on the line of a separator": GOOD.replace("apiVersion", "--- \napiVersion"),
}
STRICTER = {
    "repeated key": GOOD.replace("  suspend: false\n", "  suspend: false\n  suspend: false\n"),
    "repeated key in one line": job_text(STEP="10, step: 10"),
}
"""kubectl takes the last of them without a word, and so loses what a user wrote. We refuse them, and so does the API
server where it reads the YAML itself."""
LIST = "apiVersion: v1\nkind: List\nitems:\n- " + GOOD.replace("\n", "\n  ").rstrip(" ")
"""kubectl reads it as two documents; here the jobs of a file are documents."""
NULLS = ("null", "~", "Null", "", "!!null ''")
CASES = WHOLE | {
    f"{place}: {value}": job_text(**{place: value})
    for place in PLACES
    for value in NUMBERS + WORDS
    # A null entry of a map inside of a core/v1 type is dropped by the API server without a word; here it is a fault.
    if not (place == "SELECTOR" and value in NULLS)
}


@dataclass(frozen=True)
class Read:
    """What a reader finds: the job, or its refusal."""

    job: PseudoRealJob | None
    refusal: str = ""

    @property
    def values(self) -> Any:
        if self.job is None:
            return None
        # A null has no value as a label, and none at all.
        texts = {"labels": self.job.metadata.labels, "annotations": self.job.metadata.annotations}
        return self.job.spec, {kind: {k: v for k, v in found.items() if v} for kind, found in texts.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Case -> file with its text; the job in it has the name of the file."""
    folder, made = tmp_path_factory.mktemp("jobs"), {}
    for number, (case, text) in enumerate((CASES | STRICTER).items()):
        made[case] = folder / f"j{number}.yaml"
        made[case].write_bytes(text.replace("NAME", f"j{number}").encode())
    return made


@pytest.fixture(scope="module")
def of_cluster(kubectl: Kubectl, files: dict[str, Path]) -> dict[str, Read]:
    """Case -> what kubectl and the API server find, of all files in one go."""
    folder = next(iter(files.values())).parent
    done = kubectl("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", str(folder))
    jobs = {body["metadata"]["name"]: PseudoRealJob.from_object(body) for body in objects(done.stdout)}
    said = {name: line for line in done.stderr.splitlines() for name in re.findall(r"(j\d+)\b", line)}
    return {case: Read(jobs.get(file.stem), said.get(file.stem, "")) for case, file in files.items()}


def objects(text: str) -> Iterator[Json]:
    decoder, place = json.JSONDecoder(), 0
    while place < len(text.rstrip()):
        body, place = decoder.raw_decode(text, place)
        yield from body["items"] if body["kind"] == "List" else [body]
        place += len(text[place:]) - len(text[place:].lstrip())


def read_here(file: Path) -> Read:
    try:
        return Read(parse_job(file))
    except CommandError as error:
        return Read(None, str(error))


@pytest.mark.parametrize("case", CASES)
def test_a_text_means_the_same_to_pseudoreal_and_to_the_cluster(
    case: str, files: dict[str, Path], of_cluster: dict[str, Read]
) -> None:
    here, there = read_here(files[case]), of_cluster[case]
    assert (here.job is None) == (there.job is None), (here.refusal, there.refusal)
    assert here.values == there.values
    if here.job is None:
        assert here.refusal.startswith(str(files[case])), "the refusal names the file, and mostly line and column"


def test_the_cluster_accepts_enough_of_the_texts_to_compare_values(of_cluster: dict[str, Read]) -> None:
    accepted = [case for case, read in of_cluster.items() if read.job]
    assert len(accepted) > 150
    assert len(of_cluster) - len(accepted) > 150


@pytest.mark.parametrize("case", STRICTER)
def test_a_repeated_key_is_refused_as_by_the_api_server_itself(
    case: str, files: dict[str, Path], of_cluster: dict[str, Read], admin: client.ApiClient
) -> None:
    assert "second time; keep one of them" in read_here(files[case]).refusal
    assert of_cluster[case].job, "kubectl loses one of them"
    path = f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}?dryRun=All&fieldValidation=Strict"
    headers = {"Content-Type": "application/yaml", "Accept": "application/json"}
    request = admin.param_serialize("POST", path, header_params=headers, auth_settings=["BearerToken"])
    method, url, sent, *_ = request
    answer = admin.rest_client.pool_manager.request(method, url, headers=sent, body=files[case].read_bytes())
    assert answer.status == 400
    assert "already set in map" in answer.data.decode()


def test_a_list_of_jobs_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(LIST)
    assert "holds no object of kind PseudoRealJob" in read_here(tmp_path / "job.yaml").refusal


def test_a_learning_rate_without_quotes_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(job_text(NAME="j", RATE="3e-4"))
    said = read_here(tmp_path / "job.yaml").refusal
    assert re.search(r"job.yaml:8:15: spec.optimizer.learningRate: .*found 0.0003\); put it in quotes", said)


@pytest.mark.parametrize("side", ["client", "server"])
def test_applying_a_file_twice_changes_nothing(
    kubectl: Kubectl, admin: client.ApiClient, side: str, tmp_path: Path
) -> None:
    """Defaults of the API server are nobody's fields, and no difference."""
    namespace = f"twice-{side}"
    client.CoreV1Api(admin).create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=namespace)))
    own = ("--server-side",) if side == "server" else ()
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [*map(suspended, example_jobs())]}))
    where = (f"--namespace={namespace}", "-f", str(file))

    def applied() -> Any:
        kubectl.said("apply", *own, *where)
        found = json.loads(
            kubectl.said("get", "prj", "-o", "json", "--show-managed-fields", f"--namespace={namespace}")
        )
        return [job["metadata"] for job in found["items"]]

    first = applied()
    assert [metadata["generation"] for metadata in first] == [1] * len(example_jobs())
    assert applied() == first
    difference = kubectl("diff", *own, *where)
    assert (difference.returncode, difference.stdout) == (0, "")
    client.CoreV1Api(admin).delete_namespace(namespace)


def suspended(job: Json) -> Json:
    """Return the job as one that an operator of another test leaves alone."""
    return job | {"spec": job["spec"] | {"managedBy": "example.com/nobody"}}
