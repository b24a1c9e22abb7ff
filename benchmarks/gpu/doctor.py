"""Examine a machine with GPUs: `python -m benchmarks.gpu.doctor`.

Each check runs in a process of its own, with a time limit: a faulty driver or network hangs, or ends the process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pseudoreal_trainer.accelerator.adapters import adapter_of, found_accelerators
from pseudoreal_trainer.accelerator.environment import FIXED_WORKSPACE
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.estimate.time.hardware import TransferSpeed
from pseudoreal_trainer.measure import transfers
from pseudoreal_trainer.preflight import probes
from pseudoreal_trainer.training.start import use_deterministic_kernels
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.findings import Finding, Findings, Outcome
from benchmarks.gpu.machine import first_device
from benchmarks.gpu.results import DOCTOR_FILE
from tests.support.ports import free_port
from tests.unit.trainer.engine.support import reference
from tests.unit.trainer.engine.support.cases import Case
from tests.unit.trainer.engine.support.running import Result, run_case

LEAST_COPY = 2e9
"""Bytes a second: pinned copies over any PCIe link of 16 lanes, and of most virtual machines, are faster."""
TOLERANCE = 1e-10
"""Relative difference of losses in float64: the device sums in another order."""
SECONDS = 300.0
"""Time limit of all checks together; a sound machine takes one to two minutes."""
_SUM_SECONDS = 60.0
_QUERY = "index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"


class NotTriedError(Exception):
    """The machine lacks the part that the check examines."""


class FaultError(Exception):
    """A part of the machine is faulty; the message names the part and its figure."""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[torch.device], str]
    """Return the figures of a part. Raises FaultError, NotTriedError, and any error of torch."""
    remedy: str
    seconds: float = 60.0
    """Time limit."""


def driver(device: torch.device) -> str:
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        raise NotTriedError("nvidia-smi is not on PATH, or no NVIDIA GPU is examined")
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FaultError(f"nvidia-smi says: {(done.stdout + done.stderr).strip()}")
    return "; ".join(done.stdout.strip().splitlines())


def devices(device: torch.device) -> str:
    if device.type == "cpu":
        raise NotTriedError("the CPU is examined")
    found = [one for one in found_accelerators() if one.type == device.type]
    if not found:
        raise FaultError(f"torch {torch.__version__} finds no device of type {device.type}")
    said = []
    for one in found:
        adapter_of(one).check()
        free, total = torch.accelerator.get_memory_info(one)
        said.append(f"{one}: {adapter_of(one).name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return "; ".join(said)


def products(device: torch.device) -> str:
    said = []
    for one in _all_of(device):
        seconds, is_right = probes.product(one)
        if not is_right:
            raise FaultError(f"{one} multiplies matrices of small integers wrongly")
        said.append(f"{one}: exact, {1000 * seconds:.2f} ms")
    return "; ".join(said)


def pinned_copies(device: torch.device) -> str:
    if device.type == "cpu":
        raise NotTriedError("the CPU is examined, whose memory is the host's")
    host = torch.device("cpu")
    ways = {"to the device": (host, device), "to the host": (device, host)}
    speeds = {way: transfers.copies(*ends, 1).bytes_per_second for way, ends in ways.items()}
    if slow := [f"{way} at {speed / 1e9:.1f} GB/s" for way, speed in speeds.items() if speed < LEAST_COPY]:
        raise FaultError(f"pinned copies run {' and '.join(slow)}, less than {LEAST_COPY / 1e9:g} GB/s")
    return "; ".join(f"{way} {speed / 1e9:.1f} GB/s" for way, speed in speeds.items())


def disk(_: torch.device) -> str:
    speeds: tuple[TransferSpeed, TransferSpeed] = transfers.disk()
    return "; ".join(
        f"{way} {speed.bytes_per_second / 1e9:.2f} GB/s" for way, speed in zip(("read", "write"), speeds, strict=True)
    )


def links(device: torch.device) -> str:
    ones = _several(device)
    if device.type != "cuda":
        raise NotTriedError("torch tells only of links between CUDA's devices")
    pairs = [(a, b) for a in ones for b in ones if a != b]
    apart = [f"{a.index} to {b.index}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"no direct access from {', '.join(apart)}" if apart else f"direct access between all {len(ones)} devices"


def sums(device: torch.device) -> str:
    """Return the seconds of the all-reduces of the first device with each other one, over the device's backend."""
    said = []
    for other in _several(device)[1:]:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_sum_of_pair, (free_port(), device.type, other.index, folder), nprocs=2)
            said.append(f"0 with {other.index}: {1000 * float(Path(folder, 'seconds').read_text()):.2f} ms")
    return "; ".join(said)


def _sum_of_pair(place: int, port: int, kind: str, other: int, folder: str) -> None:
    store = TCPStore("127.0.0.1", port, is_master=place == 0, wait_for_workers=False)
    device = torch.device(kind, other if place else 0)
    torch.accelerator.set_device_index(device)
    seconds = probes.sums(store, place, device, _SUM_SECONDS)
    if place == 0:
        Path(folder, "seconds").write_text(str(seconds))


def steps_from(home: str) -> Callable[[torch.device], str]:
    """Return the check of training steps in float64 with all units in a home, against plain steps on the CPU. `home`:
    d, h or D, as in `Case.homes`."""

    def steps(device: torch.device) -> str:
        case = Case(homes=home, precision="float64")
        with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
            found = run_case(case, Ranks(0, 1, device), Path(folder)).losses
        expected, _ = reference.train(case)
        apart = max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))
        if not apart <= TOLERANCE:
            raise FaultError(
                f"losses differ from the CPU's by {apart:.1e}, more than {TOLERANCE:g}, as if copies came too early"
            )
        return f"losses differ from the CPU's by {apart:.1e}, relative"

    return steps


def repeated_steps(device: torch.device) -> str:
    """Return how much longer steps take with deterministic kernels, if two runs of them end with the same bits."""
    os.environ |= FIXED_WORKSPACE
    case = Case(options="Mixtral", homes="h", precision="bfloat16", clipping="Global")

    def run() -> tuple[float, Result]:
        with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
            begin = time.monotonic()
            found = run_case(case, Ranks(0, 1, device), Path(folder))
            return time.monotonic() - begin, found

    run()  # loads the kernels
    usual, _ = run()
    use_deterministic_kernels()
    (first_seconds, first), (second_seconds, second) = run(), run()
    if first.losses != second.losses or any(not second.weights[name].equal(w) for name, w in first.weights.items()):
        raise FaultError("two runs of the same steps end with different bits, in spite of deterministic kernels")
    return f"two runs end with the same bits; they take {min(first_seconds, second_seconds) / usual:.2f} times as long"


_COMMAND = (sys.executable, "-m", "benchmarks.gpu.doctor")
_TORCH = "install a build of torch for this machine's driver, and give the process its devices (CUDA_VISIBLE_DEVICES)"
_REPORT = "report it with this file"
CHECKS = (
    Check("driver", driver, "install or restart the driver; `dmesg` names what it lacks"),
    Check("devices", devices, _TORCH),
    Check("products", products, "take this GPU out of service, and test its memory"),
    Check("pinned copies", pinned_copies, "look at the link's width (nvidia-smi -q), at the IOMMU, and at the VM"),
    Check("disk", disk, "choose another folder with TMPDIR"),
    Check("links", links, "look at `nvidia-smi topo -m`"),
    Check("all-reduces", sums, "run again with NCCL_DEBUG=INFO, then with NCCL_P2P_DISABLE=1 as well", 120),
    Check("steps, state on the device", steps_from("d"), _REPORT),
    Check("steps, state on the host", steps_from("h"), _REPORT),
    Check("steps, state on the disk", steps_from("D"), _REPORT),
    Check("repeated steps", repeated_steps, _REPORT),
)


def examine(check: Check, device: torch.device) -> Finding:
    """Run a check in this process."""
    begin = time.monotonic()

    def finding(outcome: Outcome, text: str) -> Finding:
        return Finding(check=check.name, outcome=outcome, text=text, seconds=round(time.monotonic() - begin, 1))

    try:
        return finding("passed", check.run(device))
    except NotTriedError as reason:
        return finding("not tried", str(reason))
    except FaultError as fault:
        return finding("failed", f"{fault}: {check.remedy}")
    except Exception as error:
        return finding("failed", f"{type(error).__name__}: {str(error).strip()[:500]}: {check.remedy}")


def examine_apart(check: Check, device: str, limit: float) -> Finding:
    """Run a check in a process of its own, `limit` seconds at most."""
    begin = time.monotonic()
    if limit <= 0:
        return Finding(check=check.name, outcome="not tried", text="the time was over", seconds=0.0)

    def failed(how: str) -> Finding:
        text = f"the check {how}: {check.remedy}"
        return Finding(check=check.name, outcome="failed", text=text, seconds=round(time.monotonic() - begin, 1))

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "finding.json")
        process = subprocess.Popen([*_COMMAND, "--device", device, "--check", check.name, "--out", str(result)])
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return failed(f"did not end in {limit:.0f} s")
        if not result.exists():
            return failed(f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}")
        return Findings.validate_json(result.read_bytes())[0]


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    device = first_device(options.device)
    if options.check:
        found = [examine(next(check for check in CHECKS if check.name == options.check), device)]
    else:
        found = []
        end = time.monotonic() + options.seconds
        for check in CHECKS:
            found.append(examine_apart(check, options.device, min(check.seconds, end - time.monotonic())))
            print(f"{found[-1].outcome:9}  {check.name}: {found[-1].text} ({found[-1].seconds:.0f} s)", flush=True)
    options.out.write_bytes(Findings.dump_json(found, indent=1) + b"\n")
    return int(any(one.outcome == "failed" for one in found))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="doctor", description="Examines a machine with GPUs.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "npu", "cpu"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), DOCTOR_FILE))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all")
    parser.add_argument("--check", choices=[check.name for check in CHECKS], help="only this one, in this process")
    return parser.parse_args(arguments)


def _all_of(device: torch.device) -> list[torch.device]:
    return [one for one in found_accelerators() if one.type == device.type] or [device]


def _several(device: torch.device) -> list[torch.device]:
    found = _all_of(device)
    if len(found) < 2:
        raise NotTriedError("the machine has one device")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
