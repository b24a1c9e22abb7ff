"""Runs all tests in several pytest processes side by side: `python -m tests.support.suite [--deep] [-m MARKS]`.

Some tests compute, others mostly wait for an API server, a cluster or processes, so three runs keep two processors
busy. Tests that judge durations are marked `solo` and run after all others. Tests that compare bits are marked
`processor` if another processor may round differently; they run once more for each older set of vector instructions
that this machine can imitate. Each run leaves its log in the cache, and its results as XML.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from pseudoreal_dev.cluster import binaries
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.progress import last_line

FOLDER = paths.logs() / "tests"
AT_ONCE = 3
"""Number of pytest runs side by side."""
NOTHING_RAN = 5
"""pytest's exit code if no test was selected."""
_TELL_SECONDS = 15.0


@dataclass(frozen=True)
class Part:
    """Selection of tests for one pytest run."""

    name: str
    folders: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Subfolders of other parts."""
    marks: str = "not solo"
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    @property
    def results(self) -> Path:
        return FOLDER / f"{self.name}.xml"

    def has(self, file: Path) -> bool:
        """Return whether the file, relative to the repository, belongs to this part."""
        return any(map(file.is_relative_to, self.folders)) and not any(map(file.is_relative_to, self.ignored))

    def run(self, marks: str, options: Sequence[str]) -> int:
        """Run pytest with its output in the log; return its exit code."""
        self.results.unlink(missing_ok=True)
        chosen = f"({self.marks}) and ({marks})" if marks else self.marks
        own = [f"--junitxml={self.results}", "-o", f"cache_dir=.pytest_cache/{self.name}"]
        ignored = [f"--ignore={folder}" for folder in self.ignored]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *self.folders,
            *ignored,
            "-m",
            chosen,
            "--all-packages",
            *own,
            *options,
        ]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(self.environment)
        with self.log.open("wb") as log:
            return subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode


_TRAINER = "tests/unit/trainer"
_LONG = (
    Part("cluster", ("tests/e2e",)),
    Part("api-server", ("tests/integration",)),
    # In one part, because tests in both folders use results of the same ranks.
    Part("engine", (f"{_TRAINER}/engine", f"{_TRAINER}/plan")),
    # tests/clouds not beside tests/integration: torch would count in the memory of the operators forked there.
    Part("checkpoints", ("tests/clouds", f"{_TRAINER}/checkpoint", f"{_TRAINER}/storage", f"{_TRAINER}/cli")),
    Part("training", tuple(f"{_TRAINER}/{name}" for name in ("training", "preflight", "measure"))),
)
_UNITS = Part("units", ("tests/unit",), ignored=tuple(chain.from_iterable(part.folders for part in _LONG[2:])))
PARTS = (*_LONG, _UNITS)
"""Parts in starting order: the longest first, so none of them runs alone at the end."""
ONEDNN_LEVEL = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""ATEN_CPU_CAPABILITY -> ONEDNN_MAX_CPU_ISA of the same processors, from the oldest."""
SOLO = (
    Part(
        "solo",
        (
            *(f"{_TRAINER}/{name}" for name in ("runtime", "preflight", "training", "estimate")),
            "tests/unit/operator/lifecycle",
        ),
        marks="solo",
    ),
    # Apart, because torch would count in the memory of the operators forked here.
    Part("solo-api-server", ("tests/integration/operator/test_tenants.py",), marks="solo"),
)
"""Parts that run after all others, one after the other."""


def minor_parts(is_deep: bool) -> list[Part]:
    """Return the parts that run selected tests of the API on another minor version of Kubernetes: the oldest; with
    `is_deep`, each of them."""
    return [
        Part(
            f"api-server-{minor}",
            ("tests/integration",),
            marks="minors and not solo",
            environment={"PSEUDOREAL_KUBERNETES": minor},
        )
        for minor in (binaries.minors() if is_deep else binaries.minors()[:1])
    ]


def processor_parts(flags: str, is_deep: bool) -> list[Part]:
    """Return the parts that run the tests marked `processor` with older vector instructions than the machine's own.

    `flags` are the processor flags of /proc/cpuinfo, empty if that file does not exist. torch does not check whether
    the processor supports ATEN_CPU_CAPABILITY, so no level above the machine's own is requested. With `is_deep`, all
    combinations with oneDNN's levels are returned, including the machine's own.
    """
    known = set(flags.split())
    levels = [level for level, flag in (("default", "avx2"), ("avx2", "avx512f"), ("avx512", "")) if flag in known]
    pairs = [(level, ONEDNN_LEVEL[level]) for level in levels]
    if is_deep and levels:
        own = "avx512" if "avx512f" in known else "avx2"
        onednn = [
            "",
            *(ONEDNN_LEVEL[level] for level in (*levels, own)),
            *(["AVX512_CORE_BF16"] * ("avx512_bf16" in known)),
        ]
        pairs = [*product([*levels, own], onednn)]
    return [
        Part(
            f"processor-{aten}-{onednn or 'own'}".lower(),
            (_TRAINER,),
            marks="processor or processor_deep" if is_deep else "processor",
            environment={"ATEN_CPU_CAPABILITY": aten} | ({"ONEDNN_MAX_CPU_ISA": onednn} if onednn else {}),
        )
        for aten, onednn in pairs
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("-m", dest="marks", default="")
    chosen = parser.parse_args()
    options = ["--deep", f"--seed={secrets.randbelow(10**9)}"] if chosen.deep else []
    FOLDER.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    codes = []
    parts = [*PARTS, *minor_parts(chosen.deep), *processor_parts(_processor_flags(), chosen.deep)]
    together = _side_by_side(chosen.marks, options, parts)
    alone = (_side_by_side(chosen.marks, options, (part,)) for part in SOLO)
    for part, code in chain(together, *alone):
        codes.append((part, code))
        sys.stdout.buffer.write(part.log.read_bytes())
        sys.stdout.flush()
    return _report(codes, time.monotonic() - begin)


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def _side_by_side(marks: str, options: Sequence[str], parts: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    """Yield each finished part with pytest's exit code; print the status of the running ones now and then."""
    begin, pool = time.monotonic(), ThreadPoolExecutor(AT_ONCE)
    try:
        running = {pool.submit(part.run, marks, options): part for part in parts}
        while running:
            ended, _ = wait(running, _TELL_SECONDS, FIRST_COMPLETED)
            for future, part in running.items() if not ended else ():
                if future.running():
                    print(f"[{time.monotonic() - begin:4.0f} s] {part.name:<12} {last_line(part.log)}", flush=True)
            for future in ended:
                yield running.pop(future), future.result()
    finally:
        # After Ctrl-C, which also reaches every running pytest, start no further run.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Result:
    test: str
    """Test id on pytest's command line."""
    seconds: float
    outcome: Literal["passed", "failed", "error", "skipped"]


def _report(codes: list[tuple[Part, int]], seconds: float) -> int:
    """Print the seconds of each folder, the failures, and a summary like pytest's; return the exit code."""
    found: list[Result] = []
    failures: list[str] = []
    for part, _ in codes:
        results = read_results(part.results) if part.results.exists() else []
        found += results
        settings = "".join(f" ({name}={value})" for name, value in part.environment.items())
        bad = (result for result in results if result.outcome in ("failed", "error"))
        failures += [f"{result.outcome.upper()} {result.test}{settings}" for result in bad]
    folders = sorted({_folder(result) for result in found})
    for folder in folders:
        own = [result.seconds for result in found if _folder(result) == folder]
        print(f"{folder:<45} {len(own):>6} tests {sum(own):>8.0f} s")
    print(*failures, sep="\n")
    broken = [(part, code) for part, code in codes if code not in (0, 1, NOTHING_RAN)]
    for part, code in broken:
        print(f"ERROR pytest {part.name} ({' '.join(part.folders)}) ended with exit code {code}")
    print(_summary(found, len(broken), seconds), flush=True)
    return 0 if found and all(code in (0, NOTHING_RAN) for _, code in codes) else 1


def _folder(result: Result) -> str:
    return str(Path(result.test.partition("::")[0]).parent)


def read_results(file: Path) -> list[Result]:
    """Return the results of a pytest run from its XML report."""
    found: dict[str, Result] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        result = Result(_test_id(case), float(case.get("time", "0")), _outcome(case))
        # If a test has passed and its clean-up has failed, the report has the test twice.
        if result.test not in found or found[result.test].outcome == "passed":
            found[result.test] = result
    return [*found.values()]


def _test_id(case: ElementTree.Element) -> str:
    """Return the test id: tests.unit.test_it.TestClass and its test become tests/unit/test_it.py::TestClass::test."""
    parts = case.get("classname", "").split(".")
    file = next((index for index, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: file + 1]) + ".py", *parts[file + 1 :], case.get("name", "")])


def _outcome(case: ElementTree.Element) -> Literal["passed", "failed", "error", "skipped"]:
    if case.find("error") is not None:
        return "error"
    if case.find("failure") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def _summary(results: list[Result], broken: int, seconds: float) -> str:
    """Return a line like pytest's last one. `broken` is the number of pytest runs that did not end as they should."""
    count = Counter(result.outcome for result in results)
    count["error"] += broken
    said = [f"{count[one]} {one}" for one in ("failed", "passed", "skipped", "error") if count[one]]
    minutes, rest = divmod(round(seconds), 60)
    words = f" {', '.join(said) or 'no tests ran'} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02}) "
    return words.center(100, "=")


if __name__ == "__main__":
    sys.exit(main())
