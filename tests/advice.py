"""Output of `pseudoreal advise` and the release's evidence in docs/advice.md: `python -m tests.advice` writes them."""

import re
from pathlib import Path

from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.estimate.advice.decision import interval_text
from pseudoreal_trainer.estimate.advice.evidence import Evidence, read_evidence

_REPOSITORY = Path(__file__).parent.parent
PAGE = _REPOSITORY / "docs" / "advice.md"
_COMMAND = re.compile(r"^`pseudoreal (advise examples/.*)`:$", re.M)
_BLOCK = "(?<=<!-- {name}: written by python -m tests\\.advice -->\n).*?(?=<!-- end of {name} -->)"
_WIDTH = "130"


def with_output(text: str) -> str:
    """Return the page with the program's output and the release's evidence as they are now."""
    for name, block in {"advice": _output(text), "evidence": _table(read_evidence())}.items():
        # A function, because a replacement text may have backslashes.
        text = re.sub(_BLOCK.format(name=name), lambda _, block=block: block, text, flags=re.S)  # type: ignore[misc]
    return text


def _output(text: str) -> str:
    command = _COMMAND.search(text)
    assert command is not None, f"{PAGE} has a line with the command"
    words = [str(_REPOSITORY / word) if word.startswith("examples/") else word for word in command[1].split()]
    result = CliRunner(env={"COLUMNS": _WIDTH}).invoke(main, words)
    assert result.exit_code == 0, result.output
    return f"```text\n{result.stdout.rstrip()}\n```\n"


def _table(evidence: Evidence) -> str:
    if not evidence.trials:
        return "None so far.\n"
    lines = [
        "| kind | arm | parameters | seeds | speed-up in tokens | final loss, nats beside unshared |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for trial in evidence.trials:
        figures = (interval_text(trial.speed_up_in_tokens), interval_text(trial.loss_difference, "+.3f"))
        lines.append(
            f"| {trial.study} | {trial.arm} | {trial.parameters:,} | {trial.seeds} | {figures[0]} | {figures[1]} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_output(PAGE.read_text()))
