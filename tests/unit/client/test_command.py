"""The one command of all packages: its subcommands, and that it imports only what it needs."""

import subprocess
import sys

import pytest
from click.testing import CliRunner
from pseudoreal_client import command
from pseudoreal_trainer.cli.command import main as trainer

HEAVY = ("torch", "numpy", "kopf", "aiohttp", "prometheus_client")


def test_the_commands_of_the_trainer_are_all_there() -> None:
    assert command.LOCAL.keys() | {"plan"} == trainer.commands.keys()


@pytest.mark.parametrize("name", [name for section in command.SECTIONS.values() for name in section])
def test_each_command_has_help_and_is_listed(name: str) -> None:
    result = CliRunner().invoke(command.main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"  {name} " in CliRunner().invoke(command.main, ["--help"]).output


def test_an_unknown_command_is_a_wrong_command_line() -> None:
    assert CliRunner().invoke(command.main, ["frobnicate"]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["get", "--help"], ["validate", "examples/quickstart.yaml"], ["plan", "examples/quickstart.yaml"]],
    ids=" ".join,
)
def test_it_loads_neither_torch_nor_what_the_operator_needs(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom pseudoreal_client.command import main\n"
        f"main({arguments}, standalone_mode=False)\nprint(*({{*{HEAVY}}} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_package_that_is_missing_is_named() -> None:
    program = "import sys\nsys.modules['numpy'] = None\n"
    program += "from pseudoreal_client.command import main\nmain(['sample', 'folder'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'pseudoreal[trainer]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_shell_completes_commands_without_loading_them() -> None:
    program = (
        "import os, sys\nos.environ |= {'_P_COMPLETE': 'bash_complete', 'COMP_WORDS': 'p desc', 'COMP_CWORD': '1'}\n"
        "from pseudoreal_client.command import main\n"
        "try:\n    main(prog_name='p', complete_var='_P_COMPLETE')\n"
        "except SystemExit:\n    print(*({'kubernetes', 'pseudoreal_trainer'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert "describe" in done.stdout
