"""Output of `pseudoreal plan` for people and for programs."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pseudoreal_api.wire.messages import ExitCode
from pseudoreal_trainer.cli.command import main

EXAMPLES = Path(__file__).parents[4] / "examples"
KEYS = {
    "name",
    "parameters",
    "parameters_per_rank",
    "bytes",
    "bytes_moved_per_step",
    "exchanges",
    "fetches_per_unit",
    "reductions_per_unit",
    "idle_share",
    "step_seconds",
    "peak_device_bytes",
    "fits",
    "reasons",
}


def plan(job: dict[str, Any], file: Path, *options: str) -> Result:
    file.write_text(yaml.safe_dump(job))
    return CliRunner().invoke(main, ["plan", str(file), *options])


def phases(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["phases"]
    return found


def test_plan_json_has_its_stable_keys(job: dict[str, Any], file: Path) -> None:
    result = plan(job, file, "--json")
    assert result.exit_code == 0, result.output
    pseudo, real = phases(result)
    for phase in (pseudo, real):
        assert phase.keys() >= KEYS
        assert phase["bytes"].keys() == {"device", "host", "disk", "pinned"}
        assert phase["bytes_moved_per_step"].keys() == {
            "h2d",
            "d2h",
            "disk_read",
            "disk_write",
            "collective",
            "replicas",
            "pipeline",
            "experts",
            "context",
            "tensor",
        }
        assert phase["step_seconds"] is None
        assert phase["fits"]
        assert phase["reasons"] == []
        assert phase["peak_device_bytes"] > phase["bytes"]["device"]
    block = real["parameters"] - pseudo["parameters"]
    assert block % 3 == 0, "the second phase has three blocks more"
    assert pseudo["bytes"]["device"] == 18 * pseudo["parameters"], "master weights, moments, gradient and bfloat16 copy"


def test_plan_splits_traffic_into_within_and_between_workers(job: dict[str, Any], file: Path) -> None:
    """Two pipeline ranks, two replicas and two shards on four workers: each worker holds one replica of a pipeline
    rank."""
    layout = {"pipeline": 2, "stateSharding": "Full", "replicas": 2}
    job["spec"]["phases"][1] |= {"workers": 4, "processesPerWorker": 2, "parallelism": layout}
    job["spec"]["phases"][1]["batch"] = {"sequences": 8}
    found = phases(plan(job, file, "--json", "--phase", "real"))[0]["exchanges"]
    assert {name: one["workers_together"] for name, one in found.items()} == {"pipeline": 4, "shards": 1, "replicas": 2}
    assert found["shards"]["bytes_between_workers"] == 0
    assert found["replicas"]["bytes_within_workers"] == found["pipeline"]["bytes_within_workers"] == 0
    assert all(one["bytes_within_workers"] + one["bytes_between_workers"] > 0 for one in found.values())
    said = [
        line.split("│") for line in plan(job, file, "--phase", "real").stdout.splitlines() if "neighbouring" in line
    ]
    assert [(line[1].strip(), line[2].strip(), line[4].strip()) for line in said] == [
        ("pipeline ranks", "0 B", "4 neighbouring workers"),
        ("replicas", "0 B", "2 neighbouring workers"),
    ]
    job["spec"]["phases"][1] |= {"workers": 1, "processesPerWorker": 1, "parallelism": {}}
    alone = plan(job, file, "--phase", "real")
    assert phases(plan(job, file, "--json", "--phase", "real"))[0]["exchanges"] == {}
    assert "stays within" not in alone.stdout


def test_plan_has_a_range_for_expert_parallel_load(job: dict[str, Any], file: Path) -> None:
    """Each of two ranks has two of four experts; with top-1 routing, all tokens may go to one rank's experts."""
    job["spec"]["model"]["experts"] = {"type": "TopK", "count": 4, "topK": {"perToken": 1}}
    job["spec"]["phases"][1]["parallelism"] = {"expertRanks": 2}
    pseudo, real = phases(plan(job, file, "--json"))
    assert pseudo["imbalance"] is None
    assert real["imbalance"] == {"most_rows": 2.0, "step_seconds": None}
    said = plan(job, file, "--phase", "real").stdout
    assert (
        "the experts of all ranks get equally many tokens; the experts of one rank may get up to 2 times the mean"
        in said
    )


def test_plan_names_the_state_sharding_of_data_ranks_and_how_many_there_are(job: dict[str, Any], file: Path) -> None:
    job["spec"]["phases"][1] |= {"workers": 2, "parallelism": {}}
    pseudo, real = phases(plan(job, file, "--json"))
    assert (pseudo["state_sharding"], pseudo["data_ranks"]) == ("None", 1)
    assert (real["state_sharding"], real["data_ranks"]) == ("Full", 2)
    first, *_, second = [line for line in plan(job, file).stdout.splitlines() if line.startswith("phase ")]
    assert "stateSharding" not in first
    assert second.endswith("; stateSharding Full over 2 data ranks")


def test_option_phase_plans_one_phase(job: dict[str, Any], file: Path) -> None:
    assert [phase["name"] for phase in phases(plan(job, file, "--json", "--phase", "real"))] == ["real"]
    result = plan(job, file, "--phase", "other")
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "has no phase other; its phases are pseudo, real" in result.stderr


def test_a_phase_over_budget_ends_with_78_and_the_missing_bytes(job: dict[str, Any], file: Path) -> None:
    job["spec"]["phases"][1]["offload"] = {"budget": {"device": "10k"}}
    result = plan(job, file, "--json")
    assert result.exit_code == ExitCode.INVALID_JOB
    pseudo, real = phases(result)
    assert pseudo["fits"]
    assert not real["fits"]
    lacks = real["peak_device_bytes"] - 10_000
    assert f"({lacks} bytes) more" in real["reasons"][0]
    assert f"({lacks} bytes) more" in plan(job, file).stdout


def test_a_phase_over_the_profiles_device_memory_ends_with_78(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    profile = yaml.safe_load((EXAMPLES / "hardware" / "gpu-cluster.yaml").read_text())
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(profile | {"device_bytes": 1000}))
    result = plan(job, file, "--hardware", str(small))
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "the hardware profile's device_bytes is 1000 B, but pipeline rank 0 needs" in result.stdout


def test_measured_scratch_memory_counts_against_the_device(job: dict[str, Any], file: Path, tmp_path: Path) -> None:
    profile = yaml.safe_load((EXAMPLES / "hardware" / "gpu-cluster.yaml").read_text())
    for speeds in profile["speeds"]:
        speeds["passes"] = [row | {"scratch_share": 0.5} for row in speeds["passes"]]
    measured = tmp_path / "measured.yaml"
    measured.write_text(yaml.safe_dump(profile))
    assert phases(plan(job, file, "--json"))[1]["scratch_bytes"] is None
    real = phases(plan(job, file, "--json", "--hardware", str(measured)))[1]
    assert real["scratch_bytes"] > 0
    assert "for their own use while a pass runs" in plan(job, file, "--hardware", str(measured)).stdout
    room = real["peak_device_bytes"] + real["scratch_bytes"]
    for more, fits in ((0, True), (-1, False)):
        measured.write_text(yaml.safe_dump(profile | {"device_bytes": room + more}))
        assert phases(plan(job, file, "--json", "--hardware", str(measured)))[1]["fits"] == fits


def test_gpu_jobs_are_planned_for_a_gpu(job: dict[str, Any], file: Path) -> None:
    """For a norm, a GPU saves fewer bytes than the CPU."""
    on_cpu = phases(plan(job, file, "--json"))[1]
    job["spec"]["phases"][1] |= {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    on_gpu = phases(plan(job, file, "--json"))[1]
    assert on_gpu["peak_device_bytes"] - on_gpu["bytes"]["device"] < (
        on_cpu["peak_device_bytes"] - on_cpu["bytes"]["device"]
    )


def test_a_hardware_profile_gives_seconds_and_bottleneck(job: dict[str, Any], file: Path) -> None:
    result = plan(job, file, "--json", "--hardware", str(EXAMPLES / "hardware" / "gpu-cluster.yaml"))
    assert result.exit_code == 0, result.output
    for phase in phases(result):
        assert phase["step_seconds"] > 0
        assert phase["bottleneck"]


def test_plan_gives_the_rate_of_a_rank_and_its_share_of_a_known_peak(job: dict[str, Any], file: Path) -> None:
    """Operations by hand: three times the forward pass of the layers' matrices, causal attention, and the head."""
    job["spec"]["phases"][0] |= {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    hardware = EXAMPLES / "hardware"
    (known, _), (unknown, _) = (
        phases(plan(job, file, "--json", "--hardware", str(hardware / name)))
        for name in ("h200-machine.yaml", "gpu-machine.yaml")
    )
    tokens = 6 * 16
    layer = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 2 * 2 * 16 * 16 / 2
    operations = 3 * tokens * (4 * layer + 2 * 256 * 16)
    for phase in (known, unknown):
        assert phase["teraflops_per_second"] == pytest.approx(operations / phase["step_seconds"] / 1e12)
    assert known["mfu"] == pytest.approx(operations / known["step_seconds"] / 989e12)
    assert unknown["mfu"] is None
    shown = plan(job, file, "--hardware", str(hardware / "h200-machine.yaml")).stdout
    assert f"{known['teraflops_per_second']:.4g} TFLOP/s on a rank, an MFU of {known['mfu']:.1%})" in shown


def test_an_invalid_hardware_profile_is_an_error(job: dict[str, Any], file: Path) -> None:
    result = plan(job, file, "--hardware", str(file))
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "is not one" in result.stderr


def test_a_device_budget_moves_units_to_the_host(job: dict[str, Any], file: Path) -> None:
    before = phases(plan(job, file, "--json"))[1]
    job["spec"]["phases"][1]["offload"] = {"budget": {"device": before["peak_device_bytes"] - 1}}
    after = phases(plan(job, file, "--json"))[1]
    assert after["fits"]
    assert set(before["homes"].values()) == {"Device"}
    assert after["homes"]["blocks.3"] == "Host"
    assert after["bytes"]["host"] > 0


@pytest.mark.parametrize(
    ("blocks", "pattern", "words"),
    [
        (1, "Cycle", "multiple of parallelism.pipeline 2 (here 2)"),
        (2, "Cycle", "needs no sum over pipeline ranks"),
        (2, "Segment", "the gradients of 2 shared blocks are summed over pipeline ranks"),
    ],
)
def test_plan_hints_at_sharing_in_a_pipeline(
    job: dict[str, Any], file: Path, blocks: int, pattern: str, words: str
) -> None:
    job["spec"]["phases"][0] |= {
        "sharing": {"blocks": blocks, "pattern": pattern},
        "workers": 2,
        "parallelism": {"pipeline": 2},
    }
    (hint,) = phases(plan(job, file, "--json"))[0]["hints"]
    assert words in hint


@pytest.mark.parametrize("hardware", [False, True])
def test_trace_contains_every_pass_of_every_rank_once(
    job: dict[str, Any], file: Path, tmp_path: Path, hardware: bool
) -> None:
    job["spec"]["model"]["layers"] = 8
    batch = {"sequences": 16, "microBatches": 8}
    job["spec"]["phases"] = [
        {"name": "real", "until": {"step": 1}, "workers": 4, "batch": batch, "parallelism": {"pipeline": 4}}
    ]
    trace = tmp_path / "plan.trace.json"
    options = ["--hardware", str(EXAMPLES / "hardware" / "gpu-cluster.yaml")] if hardware else []
    result = plan(job, file, "--trace", str(trace), "--json", *options)
    assert result.exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == [f"phase real, pipeline rank {rank}" for rank in range(4)]
    spans = [event for event in events if event["ph"] == "X"]
    passes = [(e["name"], e["args"]["position"], e["args"]["micro_batch"]) for e in spans if e["tid"] == "compute"]
    layers = [one for one in passes if 0 < one[1] < 9]
    assert sorted(layers) == [(k, p, m) for k in ("Backward", "Forward") for p in range(1, 9) for m in range(8)]
    if hardware:
        (phase,) = phases(result)
        assert {"collective", "update"} & {event["tid"] for event in spans}
        last = max(e["ts"] + e["dur"] for e in spans if e["tid"] == "compute")
        assert last <= phase["step_seconds"] * 1e6 * 1.001


def test_plan_prints_tables_and_hints(job: dict[str, Any], file: Path) -> None:
    job["spec"]["phases"][1] |= {"parallelism": {"pipeline": 2}, "offload": {"home": "Host"}}
    result = plan(job, file)
    assert result.exit_code == 0, result.output
    for words in (
        "phase pseudo:",
        "phase real:",
        "host to device",
        "pseudoreal measure-hardware",
        "pipeline ranks wait",
    ):
        assert words in result.stdout


def test_fastest_layouts_match_their_own_plans(job: dict[str, Any], file: Path) -> None:
    hardware = ("--hardware", str(EXAMPLES / "hardware" / "gpu-cluster.yaml"), "--phase", "real")
    result = plan(job, file, *hardware, "--fastest", "3", "--json")
    assert result.exit_code == 0, result.output
    (phase,) = phases(result)
    seconds = [layout["step_seconds"] for layout in phase["layouts"]]
    assert len(seconds) == 3
    assert all(one <= 1.01 * other for one, other in pairwise(seconds))
    assert phase["searched"]["layouts"] >= phase["searched"]["simulated"] >= 3
    best = phase["layouts"][0]
    real = job["spec"]["phases"][1]
    real["parallelism"] = {
        "pipeline": best["pipeline"],
        "schedule": best["schedule"],
        "stateSharding": best["sharding"],
    }
    real["batch"]["microBatches"] = best["micro_batches"]
    real["activations"] = {"keep": best["keep"]}
    (planned,) = phases(plan(job, file, *hardware, "--json"))
    assert planned["step_seconds"] == best["step_seconds"]
    assert planned["bottleneck"] == best["bottleneck"]
    shown = plan(job, file, *hardware, "--fastest", "2").output
    assert "fastest layouts" in shown
    assert f"1: bottleneck: {best['bottleneck']}" in shown


def test_layout_auto_is_planned_with_the_best_of_three_layouts(job: dict[str, Any], file: Path) -> None:
    real = job["spec"]["phases"][1]
    real["parallelism"], real["batch"] = {"layout": "Auto"}, {"sequences": real["batch"]["sequences"]}
    real.pop("activations", None)
    hardware = ("--hardware", str(EXAMPLES / "hardware" / "gpu-cluster.yaml"), "--phase", "real")
    found = json.loads(plan(job, file, *hardware, "--json").output)
    (auto,), (planned,) = found["auto"], found["phases"]
    assert auto["name"] == "real"
    assert len(auto["layouts"]) == 3
    assert planned["step_seconds"] == auto["layouts"][0]["step_seconds"]
    assert planned["bottleneck"] == auto["layouts"][0]["bottleneck"]
    shown = plan(job, file, *hardware).output
    assert all(
        f"{number}: bottleneck: {layout['bottleneck']}" in shown for number, layout in enumerate(auto["layouts"], 1)
    )
    assert "phase real: " in plan(job, file, "--phase", "real").output, "without a profile, on an assumed machine"


def test_layout_auto_without_a_fitting_layout_ends_with_78(job: dict[str, Any], file: Path) -> None:
    profile = yaml.safe_load((EXAMPLES / "hardware" / "gpu-cluster.yaml").read_text()) | {"device_bytes": 1}
    hardware = file.with_name("hardware.yaml")
    hardware.write_text(yaml.safe_dump(profile))
    real = job["spec"]["phases"][1]
    real["parallelism"] = {"layout": "Auto", "hardware": str(hardware)}
    real["batch"] = {"sequences": real["batch"]["sequences"]}
    real.pop("activations", None)
    result = plan(job, file, "--phase", "real")
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "none of them is within the budget and the machine" in result.output


def test_option_fastest_needs_a_hardware_profile(job: dict[str, Any], file: Path) -> None:
    result = plan(job, file, "--fastest", "3")
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "--hardware" in result.output


def test_option_fastest_without_a_fitting_layout_ends_with_78(job: dict[str, Any], file: Path) -> None:
    profile = yaml.safe_load((EXAMPLES / "hardware" / "gpu-cluster.yaml").read_text()) | {"device_bytes": 1}
    hardware = file.with_name("hardware.yaml")
    hardware.write_text(yaml.safe_dump(profile))
    result = plan(job, file, "--hardware", str(hardware), "--fastest", "3")
    assert result.exit_code == ExitCode.INVALID_JOB
    assert "none of them is within the budget and the machine" in result.output
