"""The parts of Hugging Face's hub that are asked for files: revisions, listings, and files at a commit."""

import hashlib
import json
from dataclasses import dataclass, field
from urllib.parse import unquote

from tests.support.file_server import Answer, FileServer

FIRST, SECOND = "1" * 40, "2" * 40


@dataclass
class Hub(FileServer):
    """One repository."""

    repository: str = "datasets/owner/corpus"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> path -> content."""
    branches: dict[str, str] = field(default_factory=lambda: {"main": FIRST})
    token: str | None = None
    """The token without which the repository is not shown; None: it is public."""
    is_gated: bool = False

    def answer(self, path: str, query: str, authorization: str | None) -> Answer | None:  # noqa: ARG002
        api = self.repository if self.repository.startswith("datasets/") else f"models/{self.repository}"
        if self.token is not None and authorization != f"Bearer {self.token}":
            return _error(401, "RepoNotFound", "Repository not found")
        if path.startswith(f"/api/{api}"):
            return self._api(path.removeprefix(f"/api/{api}").strip("/"))
        if path.startswith(f"/{self.repository}/resolve/"):
            return self._refusal(path)
        return _error(401, "RepoNotFound", "Repository not found")

    def _refusal(self, path: str) -> Answer | None:
        """Return the refusal of a file; None: its content may be sent."""
        if self.is_gated:
            return _error(403, "GatedRepo", "Access to this dataset is restricted")
        return _error(404, "EntryNotFound", "Entry not found") if self.content(path) is None else None

    def _api(self, path: str) -> Answer:
        action, _, rest = path.partition("/")
        revision, _, folder = rest.partition("/")
        commit = self.commit(unquote(revision)) if action in ("revision", "tree", "paths-info") else self.commit("main")
        if commit is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        if action in ("", "revision"):
            return _json({"id": self.repository.removeprefix("datasets/"), "sha": commit, "siblings": []})
        return _json(self._tree(self.commits[commit], unquote(folder)))

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def _tree(self, files: dict[str, bytes], folder: str) -> list[dict[str, object]]:
        below = [name for name in files if not folder or name == folder or name.startswith(f"{folder}/")]
        folders = {name.rpartition("/")[0] for name in below} - {"", folder}
        entries: list[dict[str, object]] = [
            {"type": "directory", "path": name, "oid": "f" * 40, "size": 0} for name in sorted(folders)
        ]
        for name in sorted(below):
            oid = hashlib.sha1(files[name]).hexdigest()
            entries.append({"type": "file", "path": name, "oid": oid, "size": len(files[name])})
        return entries

    def content(self, path: str) -> bytes | None:
        commit, _, name = unquote(path.removeprefix(f"/{self.repository}/resolve/")).partition("/")
        return self.commits.get(self.commit(commit) or "", {}).get(name)


def _json(content: object) -> Answer:
    return Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _error(status: int, code: str, text: str) -> Answer:
    return Answer(status, json.dumps({"error": text}).encode(), {"X-Error-Code": code, "X-Error-Message": text})
