"""Both partners of a pairing have it in the same round, and every rank has enough partners."""

import pytest
from pseudoreal_trainer.preflight.pairs import pairings

SIZES = [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (1, 5), (2, 2), (4, 8), (7, 3), (16, 1), (101, 1)]


@pytest.mark.parametrize(("workers", "processes"), SIZES)
def test_both_ranks_of_a_pair_meet_in_the_same_round_on_the_same_network(workers: int, processes: int) -> None:
    world = workers * processes
    of_all = [pairings(rank, workers, processes) for rank in range(world)]
    assert len({len(rounds) for rounds in of_all}) == 1
    for rank, rounds in enumerate(of_all):
        for number, pairing in enumerate(rounds):
            if pairing is None:
                continue
            back = of_all[pairing.partner][number]
            assert back is not None
            assert (back.partner, back.network, back.round) == (rank, pairing.network, pairing.round)
            same_pod = rank // processes == pairing.partner // processes
            assert pairing.network == ("within" if same_pod else "across")
            assert same_pod or rank % processes == pairing.partner % processes


@pytest.mark.parametrize(("workers", "processes"), SIZES)
def test_every_rank_has_at_least_two_partners(workers: int, processes: int) -> None:
    for rank in range(workers * processes):
        met = [pairing for pairing in pairings(rank, workers, processes) if pairing]
        for network, members in (("across", workers), ("within", processes)):
            partners = {pairing.partner for pairing in met if pairing.network == network}
            assert len(partners) >= min(2, members - 1)


def test_the_number_of_rounds_does_not_grow_with_the_ranks() -> None:
    assert len(pairings(0, 1000, 8)) == 6
    assert len(pairings(0, 2, 1)) == 1
    assert pairings(0, 1, 1) == []
