from pathlib import Path

import pytest
import yaml
from pseudoreal_trainer.estimate.time.hardware import (
    Collectives,
    HardwareProfile,
    PassSpeed,
    Speeds,
    TransferSpeed,
    collectives_for,
    pass_speed,
    read_profile,
)

EXAMPLES = Path(__file__).parents[5] / "examples" / "hardware"
LINK = TransferSpeed(latency_seconds=1.0, bytes_per_second=10.0)


def row(hidden: int, tokens: int, speed: float, scratch: float = 0.0) -> PassSpeed:
    return PassSpeed(
        compute="float32",
        hidden=hidden,
        tokens=tokens,
        block_forward_flops_per_second=speed,
        block_backward_flops_per_second=2 * speed,
        head_flops_per_second=speed,
        scratch_share=scratch,
    )


def speeds(*rows: PassSpeed, ranks: int = 1, groups: tuple[int, ...] = ()) -> Speeds:
    return Speeds(
        ranks=ranks,
        passes=list(rows),
        pass_seconds=0,
        memory_bytes_per_second=1,
        update_on_device_seconds_per_element=0,
        update_on_host_seconds_per_element=0,
        h2d=LINK,
        d2h=LINK,
        disk_read=LINK,
        disk_write=LINK,
        point_to_point=LINK,
        collectives=[Collectives(ranks=n, all_gather=LINK, reduce_scatter=LINK, all_reduce=LINK) for n in groups],
        agree_seconds=0,
    )


GRID = speeds(row(16, 10, 100.0), row(16, 1000, 10_000.0), row(64, 10, 400.0), row(64, 1000, 10_000.0))


@pytest.mark.parametrize(
    ("hidden", "tokens", "expected"),
    [
        (16, 10, 100.0),
        (16, 100, 1000.0),  # the middle, on a logarithmic scale
        (32, 10, 200.0),
        (16, 1, 100.0),  # outside of the grid: the nearest point
        (9999, 9999, 10_000.0),
        (32, 100, (1000.0 * 2000.0) ** 0.5),
    ],
)
def test_speeds_lie_on_straight_lines_of_logarithms(hidden: int, tokens: int, expected: float) -> None:
    found = pass_speed(GRID, "float32", hidden, tokens)
    assert found.block_forward_flops_per_second == pytest.approx(expected)
    assert found.block_backward_flops_per_second == pytest.approx(2 * expected)


def test_a_precision_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no speeds for precision.compute bfloat16.*take one of float32"):
        pass_speed(GRID, "bfloat16", 16, 10)


def test_transfer_of_no_bytes_takes_no_time_and_any_other_has_latency() -> None:
    assert LINK.seconds(0) == 0
    assert LINK.seconds(30) == 4.0


def test_a_group_is_as_fast_as_the_smallest_that_it_fits_in() -> None:
    found = speeds(row(1, 1, 1), groups=(2, 8, 64))
    assert [collectives_for(found, ranks).ranks for ranks in (2, 3, 5, 20, 30, 1000)] == [2, 8, 8, 64, 64, 64]
    with pytest.raises(ValueError, match="groups of 4 ranks"):
        collectives_for(speeds(row(1, 1, 1)), 4)


def test_the_speeds_of_as_many_ranks_are_taken_or_of_the_most_below() -> None:
    measured = [speeds(row(1, 1, 1), ranks=ranks) for ranks in (4, 1, 2)]
    profile = HardwareProfile(name="x", overlaps=False, speeds=measured)
    assert [profile.for_ranks(ranks).ranks for ranks in (1, 2, 3, 4, 64)] == [1, 2, 2, 4, 4]


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = HardwareProfile(name="x", overlaps=True, device_bytes=5, speeds=[GRID])
    file = tmp_path / "profile.yaml"
    file.write_text(yaml.safe_dump(profile.model_dump(mode="json")))
    assert read_profile(file) == profile


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_example_profiles_are_valid(path: Path) -> None:
    assert read_profile(path).speeds


@pytest.mark.parametrize(
    ("text", "fault"),
    [("version: 2", "is not one: version"), ("a: [", "cannot be read"), ("- 1", "is not one"), ("", "is not one")],
)
def test_invalid_profile_is_refused_with_a_sentence(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "profile.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_profile(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_profile(tmp_path / "none.yaml")


@pytest.mark.parametrize(("tokens", "share"), [(10, 0.21), (100, 0.1), (1000, 0.0), (5, 0.21), (9999, 0.0)])
def test_scratch_share_is_interpolated_between_measurements(tokens: int, share: float) -> None:
    """1.21, 1.1 and 1 are equally spaced on a logarithmic scale."""
    found = speeds(row(16, 10, 100.0, 0.21), row(16, 1000, 100.0))
    assert pass_speed(found, "float32", 16, tokens).scratch_share == pytest.approx(share)
