"""The bundle for a machine without network is complete and small."""

import subprocess
import zipfile
from pathlib import Path

import pytest
from pseudoreal_dev.bundle import bundle, sources, wheels
from pseudoreal_dev.machine.errors import DevError


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_closure_has_what_is_imported_at_any_depth_and_its_packages(tmp_path: Path) -> None:
    files = {
        "a/__init__.py": "",
        "a/start.py": "import os\nfrom a.b import deep\ndef later():\n    import torch.nn\n    from b import name\n",
        "a/b/deep.py": "from .near import thing\n",
        "a/b/near.py": "from pydantic import BaseModel\n",
        "a/unused.py": "import nothing_known\n",
        "b.py": "",
    }
    _write(tmp_path, files)
    found = sources.closure(["a.start"], [tmp_path])
    assert {*found.files} == {"a", "a.start", "a.b.deep", "a.b.near", "b"}
    assert found.foreign == {"os": {"a.start"}, "torch": {"a.start"}, "pydantic": {"a.b.near"}}


def test_whole_packages_are_found_with_their_folders(tmp_path: Path) -> None:
    _write(tmp_path, {"a/__init__.py": "", "a/x.py": "", "a/c/y.py": "", "other/z.py": ""})
    assert [*sources.modules_below("a", [tmp_path])] == ["a", "a.c.y", "a.x"]


def test_the_projects_own_bundle_lacks_nothing() -> None:
    """Checked against Python's own modules, the machine's packages, and the modules in the carried wheels."""
    carried = {
        "pydantic",
        "pydantic_core",
        "structlog",
        "yaml",
        "click",
        "cel",
        "prometheus_client",
        "typing_extensions",
    }
    found = bundle.project_sources()
    bundle.check_imports(found.foreign, carried)
    assert {
        "tests.gpu.test_losses",
        "tests.unit.trainer.engine.support.reference",
        "pseudoreal_trainer.engine.engine",
        "benchmarks.method.gpu",
    } <= {*found.files}
    assert not any(module.startswith("pseudoreal_operator") for module in found.files)


def test_a_missing_package_is_named_with_who_imports_it() -> None:
    with pytest.raises(DevError, match=r"would lack cel, imported by a\.b; imp, imported by c"):
        bundle.check_imports({"cel": {"a.b"}, "imp": {"c"}, "torch": {"d"}, "json": {"d"}}, set())


def test_a_bundle_that_is_too_large_is_an_error_that_names_what_is_large(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"1" * 10)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "large.whl").write_bytes(b"1" * 3_000_000)
    assert bundle.check_size(tmp_path) == 3_000_010
    with pytest.raises(
        DevError, match=r"has 2\.9 MiB, more than the 2\.0 allowed; largest: wheels/large\.whl \(2\.9 MiB\)"
    ):
        bundle.check_size(tmp_path, limit=2 * 2**20)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1.0-cp310-abi3-manylinux2014_x86_64.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_17_x86_64.whl", False),
        ("a-1.0-cp313-abi3-manylinux_2_17_x86_64.whl", False),
        ("a-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", False),
        ("a-1.0-cp312-cp312-macosx_11_0_arm64.whl", False),
        ("a-1.0-cp312-cp312-musllinux_1_2_x86_64.whl", False),
    ],
)
def test_a_wheel_must_suit_the_machines_python(name: str, fits: bool) -> None:
    assert (wheels.misfits([Path(name)]) == []) == fits


def test_pins_are_those_of_the_machines_python() -> None:
    text = "a_b==1.0\nnumpy==2.4 ; python_full_version < '3.12'\nnumpy==2.5 ; python_full_version >= '3.12'\n"
    text += "colorama==0.4 ; sys_platform == 'win32'\n"
    assert wheels.pins_in(text) == {"a-b": "1.0", "numpy": "2.5"}


def test_what_a_wheel_needs_and_holds_is_read_from_it(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1.0-py3-none-any.whl"
    text = "Metadata-Version: 2.1\nName: a\nRequires-Dist: B_c>=1\nRequires-Dist: old; python_version < '3.11'\n"
    text += "Requires-Dist: more; extra == 'all'\n"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("a/__init__.py", "")
        file.writestr("_native.cpython-312-x86_64-linux-gnu.so", "")
        file.writestr("a-1.0.dist-info/METADATA", text)
    assert wheels.needs(wheels.metadata(wheel)) == ["b-c"]
    assert {*wheels.top_level([wheel])} == {"a", "_native"}


def test_the_script_says_how_it_is_used() -> None:
    script = Path(bundle.__file__).with_name("run.sh")
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(f"run.sh {verb}" in done.stdout for verb in ("test", "bench", "profile", "method"))
