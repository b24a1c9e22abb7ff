"""Everybody meets his partner in the same round, and enough of them."""

import pytest
from pseudoreal_trainer.preflight.pairs import meetings

SIZES = [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (1, 5), (2, 2), (4, 8), (7, 3), (16, 1), (101, 1)]


@pytest.mark.parametrize(("workers", "processes"), SIZES)
def test_both_meet_in_the_same_round_on_the_same_kind_of_link(workers: int, processes: int) -> None:
    world = workers * processes
    of_all = [meetings(rank, workers, processes) for rank in range(world)]
    assert len({len(rounds) for rounds in of_all}) == 1
    for rank, rounds in enumerate(of_all):
        for number, meeting in enumerate(rounds):
            if meeting is None:
                continue
            back = of_all[meeting.partner][number]
            assert back is not None
            assert (back.partner, back.link, back.round) == (rank, meeting.link, meeting.round)
            same_pod = rank // processes == meeting.partner // processes
            assert meeting.link == ("within" if same_pod else "across")
            assert same_pod or rank % processes == meeting.partner % processes


@pytest.mark.parametrize(("workers", "processes"), SIZES)
def test_a_rank_is_told_from_its_partner_by_another_partner(workers: int, processes: int) -> None:
    for rank in range(workers * processes):
        met = [meeting for meeting in meetings(rank, workers, processes) if meeting]
        for link, members in (("across", workers), ("within", processes)):
            partners = {meeting.partner for meeting in met if meeting.link == link}
            assert len(partners) >= min(2, members - 1)


def test_the_number_of_rounds_does_not_grow_with_the_ranks() -> None:
    assert len(meetings(0, 1000, 8)) == 6
    assert len(meetings(0, 2, 1)) == 1
    assert meetings(0, 1, 1) == []
