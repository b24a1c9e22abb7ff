"""Output of `pseudoreal advise`, its recommendations for two examples, and the release's evidence in docs/advice.md:
`python -m tests.advice` writes them."""

import json
import re
from pathlib import Path

from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.estimate.advice.decision import interval_text
from pseudoreal_trainer.estimate.advice.evidence import Evidence, read_evidence

_REPOSITORY = Path(__file__).parent.parent
PAGE = _REPOSITORY / "docs" / "advice.md"
_COMMAND = re.compile(r"^`pseudoreal (advise examples/.*)`:$", re.M)
_EXAMPLES = {
    "dense": "examples/gpu/124m-one-gpu.yaml --hardware examples/hardware/gpu-machine.yaml --tokens 10000000000",
    "experts": "examples/gpu/moe-30b-one-node-of-8.yaml --hardware examples/hardware/gpu-cluster.yaml"
    " --tokens 100000000000",
}
"""Kind of model -> arguments of an example."""
_BLOCK = "(?<=<!-- {name}: written by python -m tests\\.advice -->\n).*?(?=<!-- end of {name} -->)"
_WIDTH = "130"


def with_output(text: str) -> str:
    """Return the page with the program's output and the release's evidence as they are now."""
    blocks = {"defaults": _defaults(), "advice": _output(text), "evidence": _table(read_evidence())}
    for name, block in blocks.items():
        # A function, because a replacement text may have backslashes.
        text = re.sub(_BLOCK.format(name=name), lambda _, block=block: block, text, flags=re.S)  # type: ignore[misc]
    return text


def _output(text: str) -> str:
    command = _COMMAND.search(text)
    assert command is not None, f"{PAGE} has a line with the command"
    return f"```text\n{_run(command[1])}\n```\n"


def _run(arguments: str) -> str:
    words = [str(_REPOSITORY / word) if word.startswith("examples/") else word for word in arguments.split()]
    result = CliRunner(env={"COLUMNS": _WIDTH}).invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip()


def _defaults() -> str:
    lines = ["| kind | example | recommendation | because |", "| --- | --- | --- | --- |"]
    for kind, arguments in _EXAMPLES.items():
        found = json.loads(_run(f"advise {arguments} --json"))["recommendation"]
        file = arguments.partition(" ")[0]
        arm = found["arm"] if found["verdict"] == "Take" else "none: train without sharing"
        lines.append(f"| {kind} | `{file}` | {arm} | {found['reason']} |")
    return "\n".join(lines) + "\n"


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
