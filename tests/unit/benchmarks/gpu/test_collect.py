"""One command examines, tests and times a GPU, and its file is what the report reads."""

import zipfile
from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.gpu import collect, report
from benchmarks.gpu.collect import Program
from benchmarks.gpu.findings import Finding, Findings
from benchmarks.gpu.results import DOCTOR_FILE, RESULTS_FILE

FINDINGS = Findings.dump_json([Finding(check="disk", outcome="passed", text="2 GB/s", seconds=1.0)]).decode()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose modules can be run by name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_outputs_and_results_are_packed_into_one_file(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writes = f"import sys\nprint('sound')\nopen(sys.argv[sys.argv.index('--out') + 1], 'w').write({FINDINGS!r})\n"
    (programs / "examining.py").write_text(writes)
    (programs / "testing.py").write_text("import sys\nprint(sys.argv)\nsys.exit(1)\n")
    found = collect.main(
        ["--device", "cpu", "--tiny", "--seconds", "60", "--out", str(programs / "found.zip")],
        [
            Program("doctor", "examining", 0.5, DOCTOR_FILE, can_be_tiny=False),
            Program("tests", "testing", 1.0),
        ],
    )
    assert found == 1
    assert "tests ended with exit code 1" in capsys.readouterr().out
    with zipfile.ZipFile(programs / "found.zip") as packed:
        assert packed.namelist() == ["doctor.log", DOCTOR_FILE, "tests.log"]
        assert packed.read("doctor.log") == b"sound\n"
        assert b"'--tiny'" in packed.read("tests.log")
        assert Findings.validate_json(packed.read(DOCTOR_FILE))[0].check == "disk"


def test_a_program_that_hangs_is_ended_and_the_next_one_runs(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collect, "_STOP_SECONDS", 0.0)
    (programs / "hanging.py").write_text("import time\nprint('begins', flush=True)\ntime.sleep(600)\n")
    (programs / "fine.py").write_text("print('fine')\n")
    hanging, fine = Program("tests", "hanging", 0.05), Program("bench", "fine", 1.0)
    assert collect.main(["--device", "cpu", "--seconds", "60", "--out", str(programs / "f.zip")], [hanging, fine]) == 1
    assert "tests ended with exit code -9" in capsys.readouterr().out
    with zipfile.ZipFile(programs / "f.zip") as packed:
        assert packed.read("bench.log") == b"fine\n"


def test_the_report_reads_the_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("# On a GPU\n")
    monkeypatch.setattr(pages, "GPU", page)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "GPU", tmp_path / RESULTS_FILE)
    monkeypatch.setattr(report, "DOCTOR", tmp_path / DOCTOR_FILE)
    with zipfile.ZipFile(tmp_path / "found.zip", "w") as packed:
        packed.writestr(DOCTOR_FILE, FINDINGS)
        packed.writestr("../outside", "ignored")
    report.main(tmp_path / "found.zip")
    assert "| disk | passed | 2 GB/s |" in page.read_text()
    assert not (tmp_path.parent / "outside").exists()


def test_a_file_of_results_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MOST_BYTES", 100)
    with zipfile.ZipFile(tmp_path / "found.zip", "w") as packed:
        packed.writestr(DOCTOR_FILE, " " * 101)
    with pytest.raises(ValueError, match=r"gpu-doctor\.json of more than"):
        report.main(tmp_path / "found.zip")
