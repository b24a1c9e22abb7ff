"""The command line of `pseudoreal ui`; tests/unit/trainer/ui has the tests of the page and of its server."""

import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_trainer.cli import ui_command
from pseudoreal_trainer.cli.command import main


def _ui(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["ui", *arguments])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (["gone"], 78, "there is no folder gone; give the folder with the runs"),
        ([".", "-A"], 2, "FOLDER is on this machine; leave it out to show the jobs of a cluster"),
        ([".", "-n", "team"], 2, "FOLDER is on this machine"),
        (["-A", "-n", "team"], 2, "give -n or -A, not both"),
        (["--kubeconfig", "gone"], 3, "no cluster is configured"),
    ],
)
def test_a_wrong_command_line_serves_nothing(arguments: list[str], exit_code: int, sentence: str) -> None:
    shown = _ui(*arguments)
    assert (shown.exit_code, sentence in shown.stderr) == (exit_code, True), shown.output
    assert "http" not in shown.output


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = _ui(str(tmp_path), "--port", str(port))
    assert shown.exit_code == 1
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use; choose another --port" in shown.stderr


def test_the_address_is_on_loopback_and_has_a_new_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, str]] = []

    class Server:
        def __init__(self, _: object, listener: socket.socket, token: str) -> None:
            served.append((listener.getsockname()[0], token))

        def run(self) -> None: ...

    monkeypatch.setattr(ui_command, "LiveServer", Server)
    said = [_ui(str(tmp_path)).output for _ in range(2)]
    assert [address for address, _ in served] == ["127.0.0.1"] * 2
    assert all(f"/?token={token}\n" in text and len(token) >= 43 for text, (_, token) in zip(said, served, strict=True))
    assert served[0][1] != served[1][1]
