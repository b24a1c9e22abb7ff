"""Sinks that receive the metrics of each step besides metrics.jsonl, checked with the readers of each format."""

import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.logging import MLflow as Spec
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.training import metrics as training_metrics
from pseudoreal_trainer.training import sinks
from pseudoreal_trainer.training.sinks import Figures, MLflow, SinkThread, Texts, finish_sinks, parameters_of

from tests.support.checkpoints import metrics
from tests.support.patience import PATIENCE_SECONDS

FIGURES = {"train/loss": "loss", "train/gradient_norm": "gradient_norm", "train/tokens": "tokens"}
"""Name in a sink -> key of metrics.jsonl."""


@pytest.fixture
def crashed(job_body: Any, config: Any, train: Any) -> Callable[..., PhaseConfig]:
    """Return a function that trains with one sink, crashes after step 8, and resumes from the checkpoint of step 5."""

    def run(sink: dict[str, Any]) -> PhaseConfig:
        job_body["spec"]["logging"] = {"sinks": [sink]}
        job_body["spec"]["data"]["validation"]["samples"] = {"prompts": ["and *the*", "king"], "tokens": 3}
        job_body["spec"]["phases"][0]["until"]["step"] = 11
        calls = count(1)

        def crash() -> bool:
            # Before it ends, the crashed execution sends all metrics of its steps: the worst case for duplicates.
            if next(calls) == 9:
                raise Crash
            return False

        with pytest.raises(Crash):
            train(config(0), crash)
        assert train(config(0, execution=2)).step == 11
        phase: PhaseConfig = config(0)
        return phase

    return run


class Crash(Exception):
    pass


@pytest.fixture(autouse=True)
def _all_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish the sinks at a simulated crash. A crashing process ends its threads; here they would run on into the next
    execution."""
    leave = training_metrics.Reporter.__exit__

    def left(self: training_metrics.Reporter, kind: Any, *rest: Any) -> None:
        leave(self, None if kind is Crash else kind, *rest)

    monkeypatch.setattr(training_metrics.Reporter, "__exit__", left)
    # On a busy machine a service may need longer than the time that a pod grants.
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", PATIENCE_SECONDS)


def expected(phase: PhaseConfig) -> dict[str, dict[int, float]]:
    lines = metrics(phase)
    assert [line["step"] for line in lines] == list(range(1, 12))
    return {name: {line["step"]: line[key] for line in lines} for name, key in FIGURES.items()}


def written(phase: PhaseConfig) -> dict[str, dict[int, str]]:
    """Return name -> step -> prompt and generated text."""
    found: dict[str, dict[int, str]] = {}
    for line in metrics(phase):
        for number, sample in enumerate(line["samples"] or []):
            found.setdefault(f"samples/{number}", {})[line["step"]] = sample["prompt"] + sample["text"]
    assert {name: [*texts] for name, texts in found.items()} == {"samples/0": [4, 8, 11], "samples/1": [4, 8, 11]}
    return found


@pytest.mark.needs("tensorboardX")
def test_tensorboard_shows_each_step_once(crashed: Callable[..., PhaseConfig]) -> None:
    phase = crashed({"type": "TensorBoard"})
    shown = shown_by_tensorboard(Path(phase.work_directory) / "tensorboard")
    for name, values in expected(phase).items():
        assert shown[name] == pytest.approx(values, rel=1e-6), "event files store float32"
    validated = {line["step"]: line["validation_loss"] for line in metrics(phase) if line["validation_loss"]}
    assert shown["validation/loss"] == pytest.approx(validated, rel=1e-6)
    for name, texts in written(phase).items():
        found = shown[f"{name}/text_summary"]
        assert found == {step: indent(text, "    ", lambda _: True) for step, text in texts.items()}


def shown_by_tensorboard(folder: Path) -> dict[str, dict[int, Any]]:
    """Return name -> step -> number or text, as TensorBoard shows them: a START event hides all earlier values from its
    step on."""
    shown: dict[str, dict[int, Any]] = {}
    for file in sorted(folder.iterdir()):
        for event in events_in(file):
            if event.session_log.status == event.session_log.START:
                shown = {name: {s: v for s, v in of.items() if s < event.step} for name, of in shown.items()}
            for value in event.summary.value:
                steps = shown.setdefault(value.tag, {})
                assert event.step not in steps, f"step {event.step} of {value.tag} was written twice"
                texts = [text.decode() for text in value.tensor.string_val]
                steps[event.step] = texts[0] if texts else value.simple_value
    return shown


def events_in(file: Path) -> Iterator[Any]:
    """Yield the events of a file of TensorFlow records: length (8 bytes), its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    content, begin = file.read_bytes(), 0
    while begin < len(content):
        (length,) = struct.unpack_from("<Q", content, begin)
        yield Event.FromString(content[begin + 12 : begin + 12 + length])
        begin += 12 + length + 4


def test_mlflow_has_each_step_once(
    crashed: Callable[..., PhaseConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    # A file store is enough for the test; users have a server.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url = (tmp_path / "mlflow").as_uri()
    phase = crashed({"type": "MLflow", "mlflow": {"url": url, "experiment": "tests"}})
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    for name, values in expected(phase).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert len(history) == len(values)
        assert {metric.step: metric.value for metric in history} == values
    for name, texts in written(phase).items():
        artifacts = {Path(file.path).name: file.path for file in client.list_artifacts(run.info.run_id, name)}
        assert sorted(artifacts) == [f"{step:08d}.txt" for step in texts]
        for step, text in texts.items():
            file = client.download_artifacts(run.info.run_id, artifacts[f"{step:08d}.txt"], str(tmp_path))
            assert Path(file).read_text() == text


def test_a_resumed_mlflow_run_is_shown_as_running(
    config: Callable[..., PhaseConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url, job = (tmp_path / "mlflow").as_uri(), config(0).job
    client, states = MlflowClient(tracking_uri=url), []
    for _ in range(2):
        sink = MLflow(Spec(url=url, experiment="tests"), job, {"workers": 1})
        experiment = client.get_experiment_by_name("tests")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        states.append(run.info.status)
        sink.close()
    assert states == ["RUNNING", "RUNNING"]


def test_parameters_are_the_configuration_without_places_and_passwords(
    job_body: Any, config: Callable[..., PhaseConfig]
) -> None:
    job_body["spec"]["data"]["path"] = "s3://user:password@bucket/text"
    job_body["spec"]["data"]["pattern"] = "s3://user:password@bucket/*"
    job_body["spec"]["logging"] = {"sinks": [{"type": "MLflow", "mlflow": {"url": "http://user:password@mlflow"}}]}
    job_body["spec"]["pod"] = {"env": [{"name": "WANDB_API_KEY", "value": "password"}]}
    found = parameters_of(config(1))
    assert found["model.layers"] == 4
    assert found["model.feedForward.size"] == 32
    assert found["optimizer.learningRate"] == "0.01"
    assert found["precision.compute"] == "float64"
    assert found["phases.real.workers"] == 2
    assert found["phases.real.batch.sequences"] == 6
    assert found["phases.real.until.step"] == 12
    assert "password" not in str(found)
    assert all(value is not None for value in found.values())


def test_parameters_have_bounds(config: Callable[..., PhaseConfig]) -> None:
    phase = config(0)
    long = phase.data.model_copy(update={"pattern": "x" * 10_000})
    assert parameters_of(phase.model_copy(update={"data": long}))["data.pattern"] == "x" * 500


def test_mlflow_has_the_parameters_of_each_phase_once(
    config: Callable[..., PhaseConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second execution with another number of workers keeps the first number: MLflow refuses to change values."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url, job = (tmp_path / "mlflow").as_uri(), config(0).job
    many: dict[str, Any] = {f"field{n}": n for n in range(250)}
    for parameters in (many, parameters_of(config(0)), parameters_of(config(1)), many | {"field0": "changed"}):
        MLflow(Spec(url=url, experiment="tests"), job, parameters).close()
    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    expected = parameters_of(config(1)) | parameters_of(config(0)) | many
    assert run.data.params == {name: str(value) for name, value in expected.items()}


@pytest.mark.needs("wandb")
def test_weights_and_biases_are_written_offline(crashed: Callable[..., PhaseConfig]) -> None:
    phase = crashed({"type": "WeightsAndBiases", "weightsAndBiases": {"project": "tests", "mode": "Offline"}})
    files = sorted((Path(phase.work_directory) / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.stem for file in files] == [f"run-{phase.job.uid}"] * 2, "two executions share one run at the service"
    taken: dict[int, dict[str, Any]] = {}
    for file in files:
        for step, figures in records_in(file):
            # The service keeps the first values that it receives for a step.
            taken.setdefault(step, figures)
    for name, values in expected(phase).items():
        assert {step: figures[name] for step, figures in taken.items()} == values
    configured = [nested(record.update) for file in files for record in configs_in(file) if record.update]
    flat = {name: value for one in configured for name, value in one.items()}
    assert {name: flat[name] for name in parameters_of(phase)} == parameters_of(phase)
    for name, texts in written(phase).items():
        tables = {step: figures[name] for step, figures in taken.items() if name in figures}
        found = {step: json.loads(media(phase, table["path"]).read_text())["data"] for step, table in tables.items()}
        assert found == {step: [[text]] for step, text in texts.items()}


def media(phase: PhaseConfig, path: str) -> Path:
    """Return the file of a table, which `wandb sync` sends. Two executions that repeat a step write the
    same file name."""
    file, *_ = (Path(phase.work_directory) / "wandb").glob(f"offline-run-*/files/{path}")
    return file


def records_in(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and values (figures and tables) of a file that `wandb sync` reads."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    for content in leveldb_records(file.read_bytes()[7:]):
        history = messages.Record.FromString(content).history
        if history.item:
            yield history.step.num, nested(history.item)


def configs_in(file: Path) -> Iterator[Any]:
    """Yield the records of the run's configuration, those at its start included."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    for content in leveldb_records(file.read_bytes()[7:]):
        record = messages.Record.FromString(content)
        yield from (record.config, record.run.config)


def nested(items: Any) -> dict[str, Any]:
    """Return the items of a record as nested dictionaries; an item's key may be a path of keys."""
    found: dict[str, Any] = {}
    for item in items:
        *path, last = [item.key] if item.key else item.nested_key
        place = found
        for key in path:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
    return found


_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
"""Kinds of the parts of records in a LevelDB log."""


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log (doc/log_format.md) without the 7-byte header that wandb puts first."""
    block, header, record, begin = 32 << 10, 7, b"", 0
    while begin + header <= len(content):
        left = block - (begin + header) % block
        if left < header:
            begin += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, begin)
        # The first part of a record begins it, even if a writer that crashed left an earlier record without its end.
        record = (b"" if kind in (_FULL, _FIRST) else record) + content[begin + header : begin + header + length]
        begin += header + length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def leveldb_log(records: Sequence[bytes]) -> bytes:
    """Return a file with these records, as doc/log_format.md says, behind wandb's 7 bytes."""
    block, header, content = 32 << 10, 7, bytearray(b"wandb..")
    for record in records:
        rest, kinds = record, iter([_FIRST, *[_MIDDLE] * len(record)])
        while True:
            left = block - len(content) % block
            if left < header:
                content += bytes(left)
                continue
            part, rest, kind = rest[: left - header], rest[left - header :], next(kinds)
            if not rest:
                kind = _FULL if kind == _FIRST else _LAST
            content += struct.pack("<IHB", 0, len(part), kind) + part
            if not rest:
                break
    return bytes(content)


@pytest.mark.parametrize("left", range(12))
def test_the_reader_of_the_tests_finds_records_at_the_edges_of_blocks(left: int) -> None:
    """Before the second record, so many bytes of a block are left; the third record has several middle parts."""
    block, headers = 32 << 10, 2 * 7
    records = [b"a" * (block - headers - left), b"b" * 20, b"c" * 100_000, b"", b"d"]
    content = leveldb_log(records)
    assert [*leveldb_records(content[7:])] == records


def test_the_reader_of_the_tests_leaves_out_a_record_without_its_end() -> None:
    content = leveldb_log([b"a" * 40_000])
    whole = len(leveldb_log([b"a" * ((32 << 10) - 14)]))
    assert whole == 32 << 10
    assert [*leveldb_records((content[:whole] + leveldb_log([b"b"])[7:])[7:])] == [b"b"]


class Broken:
    def log(self, step: int, *_: Figures | Texts) -> None:
        if step == 3:
            raise OSError("the disk of the service is full")

    def close(self) -> None:
        raise AssertionError("it was given up")


@pytest.mark.needs("tensorboardX")
def test_a_sink_that_fails_is_given_up_and_training_goes_on(
    job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_body["spec"]["logging"] = {"sinks": [{"type": "TensorBoard"}]}
    monkeypatch.setattr(sinks, "_opener", lambda *_: Broken)
    with structlog.testing.capture_logs() as said:
        assert train(config(0)).outcome == "Succeeded"
    (given_up,) = [line for line in said if line["event"] == "sink_given_up"]
    assert given_up["error"] == "OSError: the disk of the service is full"
    assert len(metrics(config(0))) == 6


@pytest.mark.parametrize(("steps", "left_out"), [(3, []), (5, [2])])
def test_only_steps_are_counted_that_a_sink_has_not_taken(steps: int, left_out: list[int]) -> None:
    """The sink fails at step 3 and takes no further step; later steps are dropped at once."""
    sink = SinkThread("broken", Broken)
    with structlog.testing.capture_logs() as said:
        for step in range(1, steps + 1):
            sink.log(step, {}, {})
        finish_sinks([sink])
    assert [line["steps"] for line in said if line["event"] == "sink_left_steps_out"] == left_out


class Slow:
    """A sink that takes its first step only once `go` is set."""

    def __init__(self, go: threading.Event) -> None:
        self.go, self.taken = go, list[int]()

    def log(self, step: int, *_: Figures | Texts) -> None:
        self.go.wait()
        self.taken.append(step)

    def close(self) -> None:
        self.taken.append(-1)


def test_training_does_not_wait_for_a_slow_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    slow = Slow(go)
    sink = SinkThread("slow", lambda: slow, most_waiting=3)
    with structlog.testing.capture_logs() as said:
        for step in range(1, 9):
            sink.log(step, {}, {})
        monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.0)
        finish_sinks([sink])
    assert said[0]["event"] == "sink_left_steps_out"
    go.set()
    sink.join(time.monotonic() + 60)
    assert slow.taken[0] == 1
    assert slow.taken[-1] == -1, "steps that were queued in time are sent all the same"
    assert len(slow.taken) in (4, 5), "three steps were queued, plus one if the thread had already taken it"


def test_a_package_that_is_missing_is_named_before_the_first_step(
    job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_body["spec"]["logging"] = {"sinks": [{"type": "TensorBoard"}]}
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    with pytest.raises(InvalidJobError, match="TensorBoard needs the package tensorboardX, which this image does not"):
        train(config(0))
    assert not Path(config(0).work_directory).exists()
