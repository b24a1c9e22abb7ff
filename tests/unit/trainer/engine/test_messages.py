"""Messages between two pipeline ranks: their tags, and that each reaches its receiver."""

from pathlib import Path

import pytest
from pseudoreal_trainer.engine.ranks.messages import tag_of
from pseudoreal_trainer.plan.records import Flow, Receive, Send

from tests.support.forked import run_ranks
from tests.unit.trainer.engine.support.sending import MICRO_BATCHES, POSITIONS, SAME, SENT, exchange

LARGEST_TAG = 2**31 - 1


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("positions", [3, 64, POSITIONS])
def test_a_message_tag_is_a_c_int(flow: Flow, positions: int) -> None:
    for micro_batch in (0, 16_384, 65_536, MICRO_BATCHES - 1):
        for position in (1, positions - 1):
            tag = tag_of(Send(flow, position, micro_batch, 1), positions)
            assert 0 <= tag <= LARGEST_TAG
            assert tag == tag_of(Receive(flow, position, micro_batch, 0), positions)


def test_messages_of_models_up_to_a_thousand_layers_have_distinct_tags() -> None:
    ids = [(flow, p, m) for flow in Flow for p in (1, 2, 999) for m in (0, 1, 16_384, 65_536, MICRO_BATCHES - 1)]
    assert len({tag_of(Send(flow, p, m, 1), 1000) for flow, p, m in ids}) == len(ids)


def test_the_last_of_a_million_micro_batches_arrives_and_equal_tags_keep_their_order(tmp_path: Path) -> None:
    assert len({tag_of(Send(Flow.ACTIVATION, p, m, 1), POSITIONS) for p, m in SAME}) == 1
    run_ranks(exchange, 2, tmp_path)
    assert (tmp_path / "found").read_text() == str([float(number) for number in range(len(SENT))])
