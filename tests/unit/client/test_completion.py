"""Completions that kubectl receives for words after `kubectl pseudoreal`."""

import pytest
from pseudoreal_client import completion


@pytest.mark.parametrize(
    ("words", "proposals", "directive"),
    [
        (["su"], {"submit", "suspend"}, ":4"),
        (["get", "-o", "j"], {"json"}, ":4"),
        (["get", "--all"], {"--all-namespaces"}, ":4"),
        (["get", "--kubeconfig", "/nonexistent", "l"], set[str](), ":4"),
        (["submit", ""], set[str](), ":0"),
    ],
)
def test_kubectl_gets_proposals_and_a_directive(
    words: list[str],
    proposals: set[str],
    directive: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["kubectl_complete-pseudoreal", *words])
    completion.main()
    *found, last = capsys.readouterr().out.splitlines()
    assert ({*found}, last) == (proposals, directive)
