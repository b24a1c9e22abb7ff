"""Outputs of `pseudoreal` in the tutorials: `python -m tests.outputs` runs the commands and writes what they print.

The command of an output is the one that the page shows last before it, with or without `grep`. It runs where the
examples are. `job.yaml` is the file that the page tells its reader to write: a copy of an example, whose phases are the
newest YAML block before the command. A job that the page tells its reader to save under another name is there, too.
"""

import os
import re
import tempfile
from contextlib import chdir
from pathlib import Path

from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main

_REPOSITORY = Path(__file__).parent.parent
PAGES = [
    _REPOSITORY / "docs" / "tutorials" / f"{name}.md"
    for name in ("layout", "seven-billion", "one-gpu", "from-torchtitan")
]
_OUTPUT = re.compile(
    r"(?P<head><!-- output of the command above: written by python -m tests\.outputs -->\n)"
    r".*?(?P<end><!-- end of output -->)",
    re.S,
)
_COMMAND = re.compile(r"^pseudoreal (?P<arguments>[^|\n]+?)(?: \| grep -E '(?P<pattern>[^'\n]+)')?$", re.M)
_COPY = re.compile(r"^cp (?P<example>examples/\S+\.yaml) job\.yaml$", re.M)
_SAVED = re.compile(r"Save this job as\s`(?P<name>[\w.-]+\.yaml)`:\n\n```yaml\n(?P<text>.*?)^```$", re.M | re.S)
_YAML = re.compile(r"^```yaml\n(.*?)^```$", re.M | re.S)
_COLUMNS = "118"


def with_outputs(page: str) -> str:
    """Return the page with the outputs of its commands as they are now."""
    return _OUTPUT.sub(lambda match: _written(match, page[: match.start()]), page)


def _written(match: re.Match[str], before: str) -> str:
    found = [*_COMMAND.finditer(before)]
    assert found, "a command stands before its output"
    words, pattern = found[-1]["arguments"].split(), found[-1]["pattern"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("examples").symlink_to(_REPOSITORY / "examples")
        if "job.yaml" in words:
            Path("job.yaml").write_text(_job(before))
        for saved in _SAVED.finditer(before):
            Path(saved["name"]).write_text(saved["text"])
        result = CliRunner(env=os.environ | {"COLUMNS": _COLUMNS}).invoke(main, words)
    assert result.exit_code in (0, 78), result.output
    lines = [line.rstrip() for line in result.stdout.rstrip().splitlines()]
    if pattern:
        lines = [line for line in lines if re.search(pattern, line)]
    assert lines, f"pseudoreal {' '.join(words)} prints lines with {pattern}"
    text = "\n".join(lines)
    return f"{match['head']}```text\n{text}\n```\n{match['end']}"


def _job(before: str) -> str:
    """Return the file job.yaml at this place of a page: the example that it copies, with the newest phases shown."""
    copied = [*_COPY.finditer(before)]
    assert copied, "the page copies an example to job.yaml"
    text = (_REPOSITORY / copied[-1]["example"]).read_text()
    shown = [part for part in _YAML.findall(before[copied[-1].end() :]) if part.lstrip().startswith("- name:")]
    if not shown:
        return text
    begin = re.search(r"^  phases:\n", text, re.M)
    assert begin is not None, "a job has phases"
    end = re.search(r"^  [a-z#]", text[begin.end() :], re.M)
    rest = text[begin.end() + end.start() :] if end else ""
    return f"{text[: begin.end()]}{shown[-1]}{rest}"


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(with_outputs(file.read_text()))
