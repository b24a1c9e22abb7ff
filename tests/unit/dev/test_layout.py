from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_dev.images import images, layout

digests = st.lists(st.sampled_from([f"sha256:{number:064x}" for number in range(6)]), min_size=1)


def manifest_of(pieces: list[str]) -> dict[str, object]:
    return {"config": {"digest": pieces[0]}, "layers": [{"digest": digest} for digest in pieces[1:]]}


@given(pieces=digests, held=st.sets(st.sampled_from([f"sha256:{number:064x}" for number in range(6)])))
def test_exactly_what_is_not_held_is_sent_once(pieces: list[str], held: set[str]) -> None:
    missing = layout.missing_blobs(manifest_of(pieces), held)
    assert set(missing) == set(pieces) - held
    assert len(missing) == len(set(missing))


def test_only_the_changed_layer_of_an_image_is_sent() -> None:
    first = manifest_of(["sha256:config1", "sha256:base", "sha256:torch", "sha256:application1"])
    second = manifest_of(["sha256:config2", "sha256:base", "sha256:torch", "sha256:application2"])
    held = layout.missing_blobs(first, ())
    assert layout.missing_blobs(second, held) == ["sha256:config2", "sha256:application2"]


def test_the_image_that_was_exported_is_found_among_others() -> None:
    name = "org.opencontainers.image.ref.name"
    index = {"manifests": [{"digest": "sha256:a"}, {"digest": "sha256:b", "annotations": {name: "image"}}]}
    assert layout.find_descriptor(index)["digest"] == "sha256:b"


def test_a_hollow_blob_keeps_its_length_and_frees_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "HOLLOW_BYTES", 1024)
    blob = tmp_path / "blob"
    blob.write_bytes(b"x" * 100_000)
    assert not layout.is_hollow(blob)
    layout.hollow(blob)
    assert layout.is_hollow(blob)
    assert blob.stat().st_size == 100_000
    assert list(tmp_path.iterdir()) == [blob]


def test_older_tags_go_with_their_second_names_and_shared_content_stays() -> None:
    targets = {"localhost/trainer:2": "new", "localhost/trainer:1": "old", "localhost/operator:1": "other"}
    targets |= {"sha256:aa": "new", "sha256:bb": "old", "sha256:cc": "other"}
    found = images.unneeded(targets, {"localhost/trainer:2", "localhost/operator:1"})
    assert set(found) == {"localhost/trainer:1", "sha256:bb"}
