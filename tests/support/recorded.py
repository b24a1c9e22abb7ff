"""Records where all tests last passed, for docs/tested.md: `python -m tests.support.recorded`, after `make test`."""

import json
import platform
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pseudoreal_dev.machine import shell
from pseudoreal_dev.tested import FACTS

from tests.support.suite import PARTS, SOLO, Result, minor_parts, read_results

Json = dict[str, Any]

REQUIRED = (*PARTS, *minor_parts(is_deep=False), *SOLO)
"""Parts of the suite without which no run is recorded. With `--deep` there are others."""
_OWN = {"cluster", "api-server", *(part.name for part in minor_parts(is_deep=True))}
"""Parts with a number of their own in the record; the others are `programs`."""
_DAY_SECONDS = 24 * 3600


def main() -> None:
    files = {part.name: part.results for part in REQUIRED}
    if missing := [name for name, file in files.items() if not file.exists()]:
        sys.exit(f"Nothing is known of {', '.join(missing)}. Run `make test` first.")
    begin = min(file.stat().st_mtime for file in files.values()) - _DAY_SECONDS
    deep = {part.name: part.results for part in minor_parts(is_deep=True) if part.name not in files}
    files |= {name: file for name, file in deep.items() if file.exists() and file.stat().st_mtime > begin}
    run = record({name: read_results(file) for name, file in files.items()}, _machine(files["units"]))
    facts = json.loads(FACTS.read_text())
    same = ("system", "architecture", "python")
    facts["runs"] = [one for one in facts["runs"] if any(one[key] != run[key] for key in same)] + [run]
    FACTS.write_text(json.dumps(facts, indent=2) + "\n")


def record(results: Mapping[str, Sequence[Result]], machine: Json) -> Json:
    """Return the machine with the number of passed tests. Raises SystemExit if a test did not pass, or none ran."""
    bad = [one.test for found in results.values() for one in found if one.outcome in ("failed", "error")]
    if bad:
        sys.exit(f"{len(bad)} tests did not pass, first {bad[0]}. Only a run in which all pass is recorded.")
    passed: Counter[str] = Counter()
    for name, found in results.items():
        passed[name if name in _OWN else "programs"] += sum(one.outcome == "passed" for one in found)
    if idle := [name for name, found in results.items() if not any(one.outcome == "passed" for one in found)]:
        sys.exit(f"No test of {', '.join(idle)} ran. Run `make test` without MARKS.")
    return machine | {"passed": dict(sorted(passed.items()))}


def _machine(results: Path) -> Json:
    return {
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "architecture": platform.machine(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "date": f"{datetime.fromtimestamp(results.stat().st_mtime, UTC):%Y-%m-%d}",
        "commit": shell.output(["git", "rev-parse", "--short=8", "HEAD"]).strip(),
    }


if __name__ == "__main__":
    main()
