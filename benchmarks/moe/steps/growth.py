"""Step time against the number of experts, at equal compute per token."""

from typing import Any, get_args

from pseudoreal_api.spec.phase import Home
from pseudoreal_dev.machine.progress import progress

from benchmarks.agreement import LossesDiffer
from benchmarks.moe import jobs
from benchmarks.moe.results import LOG, Taken
from benchmarks.moe.steps.turns import Asked, take

COUNTS = (16, 64, 256, 1024)
LAYERS, HIDDEN, LENGTH = 2, 64, 128
PER_TOKEN, EXPERT_SIZE = 8, 512
FEW, MANY = 64, 256
"""Sequences per step."""
TURNS, STEPS = 3, 1
MOST = 1.15
"""Largest ratio to the step time with the fewest experts that counts as flat."""


def curves() -> dict[str, tuple[Home, int]]:
    """Return home and sequences per step, by name of the curve."""
    few = {name_of(home, FEW): (home, FEW) for home in get_args(Home)}
    return few | {name_of("Host", MANY): ("Host", MANY)}


def name_of(home: Home, sequences: int) -> str:
    return f"{home.lower()}, {sequences * LENGTH:,} tokens"


def body(experts: int, home: Home, sequences: int) -> dict[str, Any]:
    model = {
        "layers": LAYERS,
        "hiddenSize": HIDDEN,
        "attention": {"heads": 2},
        "sequenceLength": LENGTH,
        "feedForward": {"size": EXPERT_SIZE},
        "experts": jobs.top_k(experts, PER_TOKEN, EXPERT_SIZE),
    }
    phase = {"batch": {"sequences": sequences}, "offload": {"home": home}}
    return jobs.body(model, phase)


def measure() -> dict[str, list[Taken]]:
    found = dict[str, list[Taken]]()
    for name, (home, sequences) in curves().items():
        asked = {str(count): body(count, home, sequences) for count in COUNTS}
        with progress.step(f"steps with {COUNTS[0]} to {COUNTS[-1]} experts: {name}", log=LOG):
            found[name] = take(Asked(jobs=asked, turns=TURNS, steps=STEPS))
    check_homes(found)
    return found


def check_homes(found: dict[str, list[Taken]]) -> None:
    """Raise LossesDiffer unless the losses are equal to the bit for every home."""
    expected = {taken.label: taken.losses for taken in found[name_of("Device", FEW)]}
    for home in get_args(Home):
        for taken in found[name_of(home, FEW)]:
            if taken.losses != expected[taken.label]:
                raise LossesDiffer(f"{taken.label} experts have other losses on {home} than on the device")
