from pathlib import Path

import pytest
from pseudoreal_dev.machine.content_hash import hash_files, list_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "package" / "module.py").write_text("x = 1\n")
    (tmp_path / "package" / "__pycache__" / "module.pyc").write_bytes(b"1")
    (tmp_path / "notes.txt").write_text("not part of it")
    return tmp_path


PATTERNS = ["Dockerfile", "package"]


def test_a_folder_stands_for_its_files_without_pythons_caches(tree: Path) -> None:
    names = [path.relative_to(tree).as_posix() for path in list_files(tree, PATTERNS)]
    assert names == ["Dockerfile", "package/module.py"]


def test_the_hash_is_the_same_for_a_copy_and_for_other_files_changes(tree: Path) -> None:
    before = hash_files(tree, PATTERNS)
    (tree / "notes.txt").write_text("changed")
    (tree / "package" / "__pycache__" / "module.pyc").write_bytes(b"2")
    assert hash_files(tree, PATTERNS) == before


def test_every_kind_of_change_changes_the_hash(tree: Path) -> None:
    seen = {hash_files(tree, PATTERNS), hash_files(tree, PATTERNS, ["go 1.26"])}
    (tree / "package" / "module.py").write_text("x = 2\n")
    seen.add(hash_files(tree, PATTERNS))
    (tree / "Dockerfile").chmod(0o755)
    seen.add(hash_files(tree, PATTERNS))
    (tree / "package" / "module.py").rename(tree / "package" / "other.py")
    seen.add(hash_files(tree, PATTERNS))
    assert len(seen) == 5


def test_bytes_cannot_move_from_one_file_to_the_next_unseen(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12")
    (tmp_path / "b").write_text("3")
    before = hash_files(tmp_path, ["*"])
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("23")
    assert hash_files(tmp_path, ["*"]) != before
