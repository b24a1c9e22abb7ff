"""The command `pseudoreal`: its subcommands, and that it imports only what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pseudoreal_trainer.cli.command import SECTIONS, main
from pseudoreal_trainer.cli.common import load

HEAVY = ("torch", "numpy", "kopf", "aiohttp", "prometheus_client")


@pytest.mark.parametrize("name", [name for section in SECTIONS.values() for name in section])
def test_each_command_has_help_and_is_listed(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"  {name} " in CliRunner().invoke(main, ["--help"]).output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["frobnicate"]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["get", "--help"],
        ["validate", "examples/quickstart.yaml"],
        ["plan", "examples/quickstart.yaml"],
        ["advise", "examples/quickstart.yaml", "--tokens", "1000000"],
    ],
    ids=" ".join,
)
def test_commands_without_training_load_neither_torch_nor_the_operators_packages(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom pseudoreal_trainer.cli.command import main\n"
        f"main({arguments}, standalone_mode=False)\nprint(*({{*{HEAVY}}} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = "import sys\nsys.modules['numpy'] = None\n"
    program += "from pseudoreal_trainer.cli.command import main\nmain(['sample', 'folder'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install '.[trainer]'" in done.stderr
    assert "Traceback" not in done.stderr


def in_a_pod(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as in the image of a training pod, which lacks the packages for commands on a cluster."""
    program = (
        "import sys\nsys.modules |= {'pseudoreal_client': None, 'pseudoreal_operator': None, 'kubernetes': None}\n"
        f"from pseudoreal_trainer.cli.command import main\nmain({[*arguments]})"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_help_in_a_pod_lists_only_commands_that_work_there() -> None:
    said = in_a_pod("--help").stdout
    assert "Jobs on a cluster" not in said
    assert "  submit " not in said
    assert {"plan", "validate", "run", "export"} <= {*said.split()}


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_a_job_file_is_checked_and_planned_in_a_pod(command: str) -> None:
    done = in_a_pod(command, "examples/quickstart.yaml")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["get"], ["plan", "llm"], ["plan", "examples/quickstart.yaml", "--on-cluster"]])
def test_a_command_for_a_cluster_in_a_pod_names_the_missing_package(arguments: list[str]) -> None:
    done = in_a_pod(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"pseudoreal {arguments[0]} needs pseudoreal_client, which is not installed; run pip install '.[client]' in a"
        " checkout, or pip install 'FILE[client]' with the wheel file of a release\n"
    )


def test_shell_completion_of_commands_imports_none_of_them() -> None:
    program = (
        "import os, sys\nos.environ |= {'_P_COMPLETE': 'bash_complete', 'COMP_WORDS': 'p desc', 'COMP_CWORD': '1'}\n"
        "from pseudoreal_trainer.cli.command import main\n"
        "try:\n    main(prog_name='p', complete_var='_P_COMPLETE')\n"
        "except SystemExit:\n"
        "    print(*({'kubernetes', 'pseudoreal_client', 'torch'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert "describe" in done.stdout


@pytest.mark.parametrize("of_user", [None, "active"])
def test_waiting_threads_of_a_command_do_not_spin_unless_the_user_says_so(
    of_user: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads the variable when it is imported, so it must be set before the command's module is loaded."""
    monkeypatch.setenv("OMP_WAIT_POLICY", of_user or "")
    if of_user is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    found: list[str | None] = []

    def load_and_look(path: str, name: str) -> object:
        found.append(os.environ.get("OMP_WAIT_POLICY"))
        return load(path, name)

    monkeypatch.setattr("pseudoreal_trainer.cli.command.load", load_and_look)
    assert CliRunner().invoke(main, ["sample", "--help"]).exit_code == 0
    assert found == [of_user or "passive"]


def test_metrics_end_silently_when_their_reader_has_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' * 100_000)
    command = [
        sys.executable,
        "-c",
        f"from pseudoreal_trainer.cli.command import main\nmain(['metrics', '{tmp_path}'])",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == '{"step": 1}\n'
        process.stdout.close()
        assert process.stderr.read() == ""
