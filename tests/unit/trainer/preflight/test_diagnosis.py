"""Which ranks the preflight check blames, given the ranks' results."""

from typing import Any

import pytest
from pseudoreal_trainer.preflight.diagnosis import (
    Diagnosis,
    Fault,
    PairResult,
    RankResult,
    diagnose,
    diagnose_silent_leader,
    diagnose_start,
    sentence_of,
)
from pseudoreal_trainer.preflight.pairs import pairings
from pseudoreal_trainer.preflight.start import suspect_elsewhere

SECONDS = 30.0


def found(
    workers: int,
    processes: Any = 1,
    *,
    failed: Any = (),
    absent: Any = (),
    **by_rank: Any,
) -> Diagnosis:
    """Return the diagnosis. `failed` are pairs that could not exchange data; ranks in `absent` never answer, and
    exchanges with them fail. `by_rank` changes results, for instance r2={...}."""
    world = workers * processes
    broken = {frozenset(pair) for pair in failed}
    results = []
    for rank in range(world):
        if rank in absent:
            continue
        pair_results = [
            PairResult(
                network=pairing.network,
                partner=pairing.partner,
                seconds=None if {rank, pairing.partner} in broken or pairing.partner in absent else 0.01,
            )
            for pairing in pairings(rank, workers, processes)
            if pairing
        ]
        result = RankResult(
            rank=rank, node=f"n{rank}", product_seconds=0.1, product_right=True, pair_results=pair_results
        )
        results.append(result.model_copy(update=by_rank.get(f"r{rank}", {})))
    return diagnose({rank: f"n{rank}" for rank in range(world)}, results, SECONDS)


def named(faults: list[Fault]) -> list[list[int]]:
    return [fault.ranks for fault in faults]


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (1, 8), (9, 1)])
def test_healthy_ranks_have_no_faults(workers: int, processes: int) -> None:
    diagnosis = found(workers, processes)
    assert diagnosis == Diagnosis()
    assert diagnosis.suspect is None


def test_a_wrong_product_is_the_fault_of_its_rank() -> None:
    diagnosis = found(3, r1={"product_right": False})
    assert named(diagnosis.broken) == [[1]]
    assert diagnosis.broken[0].text == "rank 1 on node n1 computed a wrong product"
    assert diagnosis.suspect == 1


def test_a_missing_product_is_the_fault_of_its_rank() -> None:
    diagnosis = found(3, r2={"product_seconds": None, "error": "RuntimeError: CUDA error", "pair_results": []})
    assert named(diagnosis.broken) == [[2]]
    assert "rank 2 on node n2 computed no product (RuntimeError: CUDA error)" in diagnosis.broken[0].text


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_a_silent_rank_explains_the_failed_pairings_of_its_partners(world: int) -> None:
    diagnosis = found(world, absent=[1])
    assert named(diagnosis.broken) == [[1]]
    assert diagnosis.broken[0].text == "rank 1 on node n1 began and did not answer within 30 s"


@pytest.mark.parametrize("world", [3, 4, 5, 8, 9])
def test_a_cut_off_rank_is_distinguished_from_its_partners(world: int) -> None:
    for lonely in range(world):
        partners = [pairing.partner for pairing in pairings(lonely, world, 1) if pairing]
        diagnosis = found(world, failed=[(lonely, partner) for partner in partners])
        # With 3 ranks, one pair without the lonely rank remains and proves that the others are sound.
        assert named(diagnosis.broken) == [[lonely]]
        assert f"rank {lonely} on node n{lonely} could talk to none of its partners in other pods" in sentence_of(
            diagnosis
        )


def test_a_pair_that_cannot_talk_is_the_fault_of_neither() -> None:
    diagnosis = found(4, failed=[(0, 3)])
    assert named(diagnosis.broken) == [[0, 3]]
    assert diagnosis.broken[0].text == "rank 0 on node n0 and rank 3 on node n3 could not talk to each other"
    assert diagnosis.suspect is None
    assert named(found(2, failed=[(0, 1)]).broken) == [[0, 1]]


def test_a_dead_network_is_the_fault_of_no_rank() -> None:
    failed = [(a, b) for a in range(4) for b in range(a)]
    diagnosis = found(4, failed=failed)
    assert named(diagnosis.broken) == [[]]
    assert "no two ranks of different pods could talk to each other" in diagnosis.broken[0].text
    assert "spec.network" in diagnosis.broken[0].text
    assert diagnosis.suspect is None


def test_a_node_without_network_passes_the_pairings_inside_its_pod() -> None:
    """Four pods of two ranks; the third pod has no network to the others."""
    failed = [(rank, other) for rank in (4, 5) for other in range(8) if other not in (4, 5)]
    diagnosis = found(4, 2, failed=failed)
    assert named(diagnosis.broken) == [[4], [5]]


def test_a_rank_that_waits_for_a_broken_one_is_not_at_fault_for_its_next_partner() -> None:
    """NCCL may hang where gloo fails: rank 0 never reaches its second pairing, and its partner there reports rank 0."""
    first, second, third = (pairing for pairing in pairings(0, 4, 1) if pairing)
    held_up = [PairResult(network="across", partner=first.partner)]
    diagnosis = found(
        4, absent=[first.partner], failed=[(0, second.partner), (0, third.partner)], r0={"pair_results": held_up}
    )
    assert named(diagnosis.broken) == [[first.partner]]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_rank_with_a_slow_product_is_slow(world: int) -> None:
    diagnosis = found(world, r1={"product_seconds": 1.0})
    assert (diagnosis.broken, named(diagnosis.slow)) == ([], [[1]])
    assert diagnosis.slow[0].text == "rank 1 on node n1 took 1000.0 ms for a product, 10.0 times the median"
    assert found(world, r1={"product_seconds": 0.29}).slow == []


@pytest.mark.parametrize("world", [3, 4, 5, 8])
def test_a_slow_network_is_attributed_to_the_rank_and_not_to_its_partners(world: int) -> None:
    changes = {
        f"r{rank}": {
            "pair_results": [
                PairResult(network="across", partner=m.partner, seconds=0.1 if 1 in (rank, m.partner) else 0.01)
                for m in pairings(rank, world, 1)
                if m
            ]
        }
        for rank in range(world)
    }
    diagnosis = found(world, **changes)
    assert (diagnosis.broken, named(diagnosis.slow)) == ([], [[1]])
    assert "to talk to another pod, 10.0 times the median" in diagnosis.slow[0].text


def test_times_inside_pods_are_not_compared_with_times_across_pods() -> None:
    changes = {
        f"r{rank}": {
            "pair_results": [
                PairResult(network=m.network, partner=m.partner, seconds=0.001 if m.network == "within" else 0.1)
                for m in pairings(rank, 2, 4)
                if m
            ]
        }
        for rank in range(8)
    }
    assert found(2, 4, **changes) == Diagnosis()


def test_ranks_that_never_start_are_named() -> None:
    diagnosis = diagnose_start(3, {0: "n0", 2: "n2"}, 600)
    assert named(diagnosis.broken) == [[1]]
    assert diagnosis.broken[0].text == "rank 1, whose node is not known, did not begin within 600 s"
    assert diagnose_start(2, {0: "n0", 1: "n1"}, 600) == Diagnosis()


def test_a_silent_leader_is_named_by_the_other_ranks() -> None:
    assert diagnose_silent_leader({0: "n0"}, 30).suspect == 0
    assert "rank 0 on node n0" in diagnose_silent_leader({0: "n0"}, 30).broken[0].text
    assert "whose node is not known" in diagnose_silent_leader({}, 30).broken[0].text


def test_the_sentence_about_faults_names_the_remedy_and_stays_short() -> None:
    said = sentence_of(found(8, **{f"r{rank}": {"product_right": False} for rank in range(2, 8)}))
    assert "rank 2 on node n2 computed a wrong product" in said
    assert "; and 2 more" in said
    assert "kubectl cordon" in said
    assert len(said) < 1000


@pytest.mark.parametrize(("suspect", "rank", "expected"), [(None, 0, None), (3, 0, 3), (3, 2, None), (0, 1, None)])
def test_a_pod_does_not_suspect_itself(suspect: int | None, rank: int, expected: int | None) -> None:
    """The operator attributes a pod's own fault by the pod itself."""
    assert suspect_elsewhere(suspect, rank, processes=2) == expected
