"""Inputs under URLs: the hub, a web server, and S3, all on this machine."""

import errno
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.data.prepare.group import Work, prepare_group
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.reading import files, remote
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.prepare.shards import Target
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage import services
from structlog.testing import capture_logs

from tests.support.file_server import Answer, FileServer, serving
from tests.support.hub import FIRST, SECOND, Hub
from tests.support.patience import PATIENCE_SECONDS
from tests.unit.trainer.data.prepare.support import corpora
from tests.unit.trainer.data.prepare.support.silent import Silent
from tests.unit.trainer.data.prepare.support.small import TEXTS
from tests.unit.trainer.storage.support.object_server import Bucket, bucket, endpoint

__all__ = ["bucket", "endpoint"]

SECRET = "hf_secretsecret"
DATASET = "hf://datasets/owner/corpus"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WAITS", (0.0,) * 5)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub(commits={FIRST: {}})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield served


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def web(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serving(FileServer(), authority.issue("web", hosts=["localhost"])) as served:
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        yield served


def prepared(places: Sequence[str | Path], output: Path, shard_bytes: int = 600) -> dict[str, bytes]:
    """Prepare all groups in this process; return name -> content of the shards' files."""
    output.mkdir(exist_ok=True)
    for group in groups_of(find_inputs(places)):
        prepare_group(Work(group, Settings(shard_bytes=shard_bytes), output), ByteTokenizer(), Silent())
    return {file.name: file.read_bytes() for file in sorted(output.iterdir()) if file.is_file()}


class _Stopped(Exception):
    """The end of a run in the middle of its work."""


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], None]:
    """Make the next run fail as it writes a shard."""
    write = Target.write

    def stop(shard: int, error: Exception) -> None:
        def until(self: Target, index: int, documents: Any) -> Any:
            if index == shard:
                monkeypatch.setattr(Target, "write", write)
                raise error
            return write(self, index, documents)

        monkeypatch.setattr(Target, "write", until)

    return stop


class TestPlaces:
    @pytest.mark.parametrize("form", ["jsonl", "gzip", "zstandard", "parquet", "text"])
    def test_files_of_each_place_make_the_shards_of_local_files(
        self, form: str, hub: Hub, web: FileServer, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks are smaller than files, so they cut lines, characters, frames and pages."""
        monkeypatch.setattr(files, "_BLOCK", 251)
        folder = tmp_path / "inputs"
        folder.mkdir()
        written = getattr(corpora, f"write_{form}")(folder, [f"{text} é" for text in TEXTS])
        expected = prepared([written], tmp_path / "local")
        for file in folder.iterdir():
            hub.commits[FIRST][f"data/{file.name}"] = web.files[f"/{file.name}"] = file.read_bytes()
            bucket.write(f"data/{file.name}", file.read_bytes())
        names = sorted(file.name for file in folder.iterdir())
        assert prepared([f"{DATASET}/data"], tmp_path / "hub") == expected
        assert prepared([f"{bucket.url}/data/*.*"], tmp_path / "bucket") == expected
        assert prepared([f"{web.url}/{name}" for name in names], tmp_path / "web") == expected

    def test_names_are_paths_below_the_folder_or_the_fixed_part_of_a_pattern(self, hub: Hub) -> None:
        lines = corpora.json_lines(TEXTS[:2])
        hub.commits[FIRST] = {"en/b/1.jsonl": lines, "en/a.jsonl": lines, "en/meta.json": b"{}", "README.md": b"#"}
        found = {url: [each.name for each in find_inputs([url])] for url in (DATASET, f"{DATASET}/en/**/*.jsonl")}
        assert found == {
            DATASET: ["en/a.jsonl", "en/b/1.jsonl"],
            f"{DATASET}/en/**/*.jsonl": ["a.jsonl", "b/1.jsonl"],
        }
        assert [each.name for each in find_inputs([f"{DATASET}/en/meta.json"])] == ["meta.json"]

    def test_all_files_are_of_the_commit_that_the_branch_was_at(self, hub: Hub, tmp_path: Path) -> None:
        hub.commits[FIRST]["a.jsonl"] = corpora.json_lines(TEXTS)
        [group] = groups_of(find_inputs([f"{DATASET}@main"]))
        hub.commits[SECOND] = {"a.jsonl": corpora.json_lines(["other"] * 20)}
        hub.branches["main"] = SECOND
        (tmp_path / "tokens").mkdir()
        prepare_group(Work(group, Settings(), tmp_path / "tokens"), ByteTokenizer(), Silent())
        found = prepared([f"{DATASET}@{FIRST}"], tmp_path / "pinned")
        assert (tmp_path / "tokens" / "00000.bin").stat().st_size == sum(
            len(content) for name, content in found.items() if name.endswith(".bin")
        )

    def test_requests_are_no_larger_than_a_block(
        self, web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "_BLOCK", 1000)
        web.files["/a.parquet"] = corpora.write_parquet(tmp_path, [text * 30 for text in TEXTS]).read_bytes()
        prepared([f"{web.url}/a.parquet"], tmp_path / "tokens")
        sizes = []
        for wanted in web.ranges("/a.parquet"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            sizes.append(int(end) - int(begin) + 1)
        assert len(sizes) > 3
        assert max(sizes) <= 1000

    @pytest.mark.needs("huggingface_hub")
    def test_the_command_prepares_a_dataset_of_the_hub_in_processes(self, hub: Hub, tmp_path: Path) -> None:
        hub.commits[FIRST] = {f"{n}.jsonl": corpora.json_lines(TEXTS) for n in range(2)}
        arguments = ["data", "prepare", DATASET, "--output", str(tmp_path / "tokens"), "--tokenizer", "bytes"]
        ended = CliRunner().invoke(main, arguments)
        assert ended.exit_code == 0, ended.output
        assert f"{2 * len(TEXTS)} documents" in ended.stdout
        assert f"{DATASET}@{FIRST}" in ended.stderr


class TestResumption:
    @pytest.mark.parametrize("form", ["jsonl", "parquet"])
    def test_what_is_in_finished_shards_is_not_read_again(
        self, form: str, web: FileServer, tmp_path: Path, stop_at: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The file is longer than the 64 KiB at its end that the reader of Parquet asks for at once."""
        monkeypatch.setattr(files, "_BLOCK", 4096)
        texts = [random.Random(number).randbytes(2000).hex() for number in range(60)]
        file = getattr(corpora, f"write_{form}")(tmp_path, texts)
        url, path = f"{web.url}/{file.name}", f"/{file.name}"
        web.files[path] = file.read_bytes()
        expected = prepared([url], tmp_path / "undisturbed", shard_bytes=184_000)
        assert sum(name.endswith(".bin") for name in expected) == 3
        whole = len(web.ranges(path))
        stop_at(2, _Stopped())
        with pytest.raises(_Stopped):
            prepared([url], tmp_path / "tokens", shard_bytes=184_000)
        web.requests.clear()
        assert prepared([url], tmp_path / "tokens", shard_bytes=184_000) == expected
        assert len(web.ranges(path)) < whole * 0.55
        web.requests.clear()
        assert prepared([url], tmp_path / "tokens", shard_bytes=184_000) == expected
        assert web.ranges(path) == ["bytes=0-0"], "only its size and version are asked for"

    def test_whole_inputs_of_a_group_are_not_read_again(self, hub: Hub, tmp_path: Path, stop_at: Any) -> None:
        """A compressed file can be read from its start alone."""
        for number in range(4):
            (tmp_path / f"{number}").mkdir()
            file = corpora.write_gzip(tmp_path / f"{number}", TEXTS[5 * number : 5 * number + 5])
            hub.commits[FIRST][f"{number}.jsonl.gz"] = file.read_bytes()
        expected = prepared([DATASET], tmp_path / "undisturbed")
        stop_at(2, _Stopped())
        with pytest.raises(_Stopped):
            prepared([DATASET], tmp_path / "tokens")
        hub.requests.clear()
        assert prepared([DATASET], tmp_path / "tokens") == expected
        read = {line.split()[1].rpartition("/")[2] for line in hub.requests if "/resolve/" in line}
        assert "0.jsonl.gz" not in read
        assert "3.jsonl.gz" in read

    def test_records_of_an_earlier_release_are_gone_on_from(self, tmp_path: Path, stop_at: Any) -> None:
        file = corpora.write_jsonl(tmp_path, TEXTS)
        expected = prepared([file], tmp_path / "undisturbed")
        stop_at(1, _Stopped())
        with pytest.raises(_Stopped):
            prepared([file], tmp_path / "tokens")
        record = tmp_path / "tokens" / "prepared" / "00000.json"
        found = json.loads(record.read_text())
        del found["shards"][0]["next"]
        record.write_text(json.dumps(found))
        assert prepared([file], tmp_path / "tokens") == expected

    def test_places_of_faults_count_from_the_start_of_the_file(self, tmp_path: Path, stop_at: Any) -> None:
        file = corpora.write_jsonl(tmp_path, TEXTS)
        stop_at(1, _Stopped())
        with pytest.raises(_Stopped):
            prepared([file], tmp_path / "tokens")
        lines = file.read_bytes().splitlines(keepends=True)
        lines[-1] = b"[" + lines[-1][1:]
        file.write_bytes(b"".join(lines))
        with pytest.raises(InvalidJobError, match=r"a.jsonl line 20 cannot be used"):
            prepared([file], tmp_path / "tokens")

    def test_a_file_with_another_version_is_prepared_again(self, hub: Hub, tmp_path: Path) -> None:
        hub.commits[FIRST]["a.jsonl"] = corpora.json_lines(TEXTS)
        prepared([DATASET], tmp_path / "tokens")
        changed = [text.replace("document", "tnemucod") for text in TEXTS]
        hub.commits[SECOND], hub.branches["main"] = {"a.jsonl": corpora.json_lines(changed)}, SECOND
        found = prepared([DATASET], tmp_path / "tokens")
        assert found == prepared([f"{DATASET}@{SECOND}"], tmp_path / "fresh")

    def test_a_full_disk_loses_no_finished_shard(self, hub: Hub, tmp_path: Path, stop_at: Any) -> None:
        hub.commits[FIRST]["a.jsonl"] = corpora.json_lines(TEXTS)
        stop_at(2, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            prepared([DATASET], tmp_path / "tokens")
        before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tokens").glob("*.bin")}
        assert len(before) == 2
        prepared([DATASET], tmp_path / "tokens")
        after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tokens").glob("*.bin")}
        assert after.items() >= before.items()


class TestFaults:
    @pytest.mark.parametrize(
        "faults",
        [
            [Answer(503), Answer(500)],
            [Answer(206, b"x" * 300, {"Content-Range": "bytes 0-299/300"}, cut_at=10)] * 5,
            [Answer(429), Answer(206, b"", cut_at=0)],
        ],
        ids=["unavailable", "cut", "limited"],
    )
    def test_requests_that_fail_for_a_while_are_made_again(
        self, faults: list[Answer], web: FileServer, tmp_path: Path
    ) -> None:
        file = corpora.write_jsonl(tmp_path, TEXTS)
        web.files["/a.jsonl"] = file.read_bytes()
        for fault in faults:
            fault.headers["ETag"] = web.etag("/a.jsonl")
            fault.headers.setdefault("Content-Range", "bytes 0-1/2")
        web.faults = [*faults]
        with capture_logs() as logs:
            found = prepared([f"{web.url}/a.jsonl"], tmp_path / "tokens")
        assert found == prepared([file], tmp_path / "local")
        assert len([each for each in logs if each["event"] == "request_failed"]) == len(faults)
        assert web.faults == []

    def test_retries_are_bounded(self, web: FileServer, tmp_path: Path) -> None:
        web.files["/a.jsonl"] = corpora.json_lines(TEXTS)
        web.faults = [Answer(503) for _ in range(100)]
        with pytest.raises(TrainingError, match=r"access to https://localhost.*/a.jsonl: HTTPError: HTTP Error 503"):
            prepared([f"{web.url}/a.jsonl"], tmp_path / "tokens")
        assert len(web.faults) == 94

    def test_a_refusal_is_final(self, web: FileServer, tmp_path: Path) -> None:
        web.files["/a.jsonl"] = corpora.json_lines(TEXTS)
        web.faults = [Answer(403) for _ in range(100)]
        with pytest.raises(TrainingError, match="HTTP Error 403"):
            prepared([f"{web.url}/a.jsonl"], tmp_path / "tokens")
        assert len(web.faults) == 99

    @pytest.mark.parametrize("place", ["web", "bucket"])
    def test_a_file_that_changes_while_it_is_read_is_an_error(
        self, place: str, web: FileServer, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its first part is of one version, its rest of another: what is between is no JSON."""
        monkeypatch.setattr(files, "_BLOCK", 64)
        old, new = (corpora.json_lines([f"{word} {text}" for text in TEXTS]) for word in ("old", "newer"))
        url = f"{web.url}/a.jsonl" if place == "web" else f"{bucket.url}/a.jsonl"

        def write(content: bytes) -> None:
            web.files["/a.jsonl"] = content
            bucket.write("a.jsonl", content)

        write(old)
        [group] = groups_of(find_inputs([url]))
        read = files._range

        def changing(file: files.RemoteFile, begin: int, end: int) -> bytes:
            if begin >= 512:
                write(new)
            return read(file, begin, end)

        monkeypatch.setattr(files, "_range", changing)
        (tmp_path / "tokens").mkdir()
        with pytest.raises(TrainingError, match=rf"{url} has changed while it was read"):
            prepare_group(Work(group, Settings(), tmp_path / "tokens"), ByteTokenizer(), Silent())

    @pytest.mark.parametrize("place", ["web", "bucket"])
    def test_a_file_that_is_shorter_than_it_was_has_changed(
        self, place: str, web: FileServer, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server then refuses to send a range that begins after the end of the file."""
        monkeypatch.setattr(files, "_BLOCK", 64)
        lines = corpora.json_lines(TEXTS)
        url = f"{web.url}/a.jsonl" if place == "web" else f"{bucket.url}/a.jsonl"
        web.files["/a.jsonl"] = lines
        bucket.write("a.jsonl", lines)
        [group] = groups_of(find_inputs([url]))
        web.files["/a.jsonl"], web.etags["/a.jsonl"] = lines[:100], web.etag("/a.jsonl")
        bucket.write("a.jsonl", lines[:100])
        (tmp_path / "tokens").mkdir()
        with pytest.raises(TrainingError, match=rf"{url} has changed while it was read: it had {len(lines):,} bytes"):
            prepare_group(Work(group, Settings(), tmp_path / "tokens"), ByteTokenizer(), Silent())

    def test_a_file_is_one_after_a_request_for_it_has_failed(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket.write("a.jsonl", corpora.json_lines(TEXTS))
        kind, failures = type(services.file_system(bucket.url)), [OSError("reset")]
        info = kind._info

        async def failing(*arguments: Any, **named: Any) -> Any:
            if failures:
                raise failures.pop()
            return await info(*arguments, **named)

        monkeypatch.setattr(kind, "_info", failing)
        [found] = find_inputs([f"{bucket.url}/a.jsonl"])
        assert (found.name, found.path) == ("a.jsonl", f"{bucket.url}/a.jsonl")

    def test_a_server_without_parts_is_refused(self, web: FileServer) -> None:
        web.files["/a.jsonl"] = corpora.json_lines(TEXTS)
        web.has_ranges = False
        with pytest.raises(TrainingError, match=r"a.jsonl does not send parts of a file \(Range\); download the file"):
            find_inputs([f"{web.url}/a.jsonl"])

    def test_a_redirect_to_http_is_refused(self, web: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
        elsewhere = {"Location": "http://169.254.169.254/latest/meta-data?token=1"}
        monkeypatch.setattr(web, "respond", lambda *_: Answer(302, b"", elsewhere))
        with pytest.raises(
            TrainingError, match=r"redirects to http://169.254.169.254/latest/meta-data\?…, which is not"
        ):
            find_inputs([f"{web.url}/a.jsonl"])


class TestWaitsForTheHub:
    @pytest.fixture(autouse=True)
    def slept(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Seconds for which the library has slept."""
        hub.commits[FIRST]["a.jsonl"] = corpora.json_lines(TEXTS)
        slept: list[float] = []
        really_sleep, others = time.sleep, {*threading.enumerate()} - {threading.current_thread()}

        def sleep(seconds: float) -> None:
            if threading.current_thread() in others:
                # Threads that other tests have left, for instance a table of `pseudoreal ui` that tries again.
                really_sleep(seconds)
                return
            assert seconds < 1000, "the library would sleep for longer than anybody waits"
            slept.append(seconds)

        monkeypatch.setattr(time, "sleep", sleep)
        return slept

    @pytest.mark.parametrize(
        ("status", "header", "text"),
        [
            (429, "Retry-After", "86400"),
            (503, "Retry-After", "86400"),
            (429, "RateLimit", '"resolvers";r=0;t=86400'),
        ],
    )
    def test_a_long_wait_that_the_hub_asks_for_is_an_error(
        self, status: int, header: str, text: str, hub: Hub, tmp_path: Path
    ) -> None:
        hub.faults = [Answer(status, b"", {header: text}) for _ in range(100)]
        with pytest.raises(TrainingError, match=r"^the hub asks to wait 86,400 s .*, and 300 s is the longest wait"):
            prepared([DATASET], tmp_path / "tokens")
        assert len(hub.faults) == 99

    def test_a_short_wait_that_the_hub_asks_for_is_waited(self, hub: Hub, tmp_path: Path, slept: list[float]) -> None:
        hub.faults = [
            Answer(429, b"", {"Retry-After": "7"}),
            Answer(429, b"", {"RateLimit": '"resolvers";r=0;t=250'}),
            Answer(503, b"", {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}),
        ]
        assert prepared([DATASET], tmp_path / "tokens")
        assert [seconds for seconds in slept if seconds > 1][:2] == [8, 251]
        assert hub.faults == []

    def test_a_hub_that_says_nothing_is_given_up(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_WAITS", ())
        monkeypatch.setattr(services, "_SILENCE", 0.2)
        respond, over = hub.respond, threading.Event()

        def silent_listing(path: str, *others: str | None) -> Answer:
            if "/tree/" in path:
                over.wait(PATIENCE_SECONDS)
            return respond(path, *others)  # type: ignore[arg-type]

        monkeypatch.setattr(hub, "respond", silent_listing)
        try:
            with pytest.raises(TrainingError, match="cannot be read from the hub: ReadTimeout"):
                find_inputs([f"{DATASET}@{FIRST}/a.jsonl"])
        finally:
            over.set()


class TestRefusals:
    @pytest.fixture(autouse=True)
    def corpus(self, hub: Hub) -> None:
        hub.commits[FIRST] = {"a.jsonl": corpora.json_lines(TEXTS), "README.md": b"#"}

    @pytest.mark.parametrize(
        ("url", "says"),
        [
            (
                f"{DATASET}@gone/a.jsonl",
                "the dataset owner/corpus has no revision gone; its branches, tags and commits",
            ),
            ("hf://datasets/owner/other", "the dataset owner/other is not on the hub, or it is private, or the token"),
            (f"{DATASET}/b.jsonl", "b.jsonl matches no file; check the name, and the pattern"),
            (f"{DATASET}/*.parquet", r"\*.parquet matches no file"),
            (f"{DATASET}/README.md", "README.md is of no kind that can be prepared from a URL; these are: "),
            (f"{DATASET}/*.md", r"\*.md holds no file to prepare \(1 of other kinds\); these are: "),
            ("hf://owner/corpus", "hf://owner/corpus is no dataset; give hf://datasets/OWNER/NAME"),
            ("hf://datasets/corpus", "hf://datasets/corpus is no dataset"),
            ("ftp://host/a.jsonl", "inputs under ftp:// cannot be read; give a path, or a URL with s3://, gs://"),
            ("http://host/a.jsonl", "inputs under http:// cannot be read"),
            ("https://me:pw@host/a.jsonl", "a URL of https:// with a user or password is not taken"),
            ("https://host/*.jsonl", "has a wildcard, and web servers do not list files"),
        ],
    )
    def test_a_place_that_cannot_be_read_is_a_sentence(self, url: str, says: str) -> None:
        with pytest.raises((InvalidJobError, TrainingError), match=says) as raised:
            find_inputs([url])
        assert "pw" not in str(raised.value)

    def test_a_gated_dataset_is_a_sentence(self, hub: Hub, tmp_path: Path) -> None:
        hub.is_gated = True
        says = (
            r"the dataset owner/corpus is gated: accept its conditions on http://.*/datasets/owner/corpus, and set HF"
        )
        with pytest.raises(TrainingError, match=says):
            prepared([DATASET], tmp_path / "tokens")

    def test_a_token_that_is_not_valid_any_more_is_a_sentence(self, hub: Hub) -> None:
        hub.token = "another"
        with pytest.raises(TrainingError, match=r"or the token is not valid any more.* set HF_TOKEN to a token"):
            find_inputs([DATASET])

    def test_files_without_number_are_refused(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote, "MOST_FILES", 3)
        hub.commits[FIRST] = {f"{number}.jsonl": b"" for number in range(4)}
        with pytest.raises(InvalidJobError, match="holds 4 files to prepare, and 3 is the most; give patterns"):
            find_inputs([DATASET])

    def test_a_file_that_two_patterns_match_is_refused(self) -> None:
        with pytest.raises(InvalidJobError, match=r"a.jsonl is given twice"):
            find_inputs([DATASET, f"{DATASET}/a.jsonl"])

    def test_a_bucket_that_is_not_there_is_a_sentence(self, bucket: Bucket) -> None:
        bucket.client.delete_bucket(Bucket=bucket.name)
        with pytest.raises(
            TrainingError, match=r"access to s3://bucket-.*bucket does not exist; check the bucket, and AWS_"
        ):
            find_inputs([f"{bucket.url}/a.jsonl"])

    def test_a_service_without_its_packages_names_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(TrainingError, match=r"needs packages that are not installed; run pip install '\.\[hf\]'"):
            find_inputs([DATASET])


def test_secrets_are_in_no_log_record_or_error(web: FileServer, hub: Hub, tmp_path: Path) -> None:
    web.files["/a.jsonl"] = hub.commits[FIRST]["a.jsonl"] = corpora.json_lines(TEXTS)
    web.faults = [Answer(500)]
    said = []
    with capture_logs() as logs:
        prepared([f"{web.url}/a.jsonl?sig={SECRET}", DATASET], tmp_path / "tokens")
        for url in (f"{web.url}/b.jsonl?sig={SECRET}", f"{DATASET}@gone"):
            with pytest.raises(TrainingError) as raised:
                find_inputs([url])
            said.append(str(raised.value))
    assert f"Bearer {SECRET}" in hub.authorizations
    assert web.authorizations == {None}
    files_text = [file.read_text(errors="replace") for file in (tmp_path / "tokens").rglob("*") if file.is_file()]
    assert SECRET not in json.dumps([logs, said, files_text], default=str)
    assert "a.jsonl" in json.dumps(files_text)
