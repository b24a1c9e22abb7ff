from collections import Counter, defaultdict
from math import log

import numpy as np
import pytest
from pseudoreal_trainer.data import baseline
from pseudoreal_trainer.data.baseline import order2_nats

TEXT = b"in the beginning was the word, and the word was with the king; and so it was in the end of the day."


def _brute_force(train: bytes, text: bytes, targets: list[int]) -> float:
    followers: dict[bytes, Counter[int]] = defaultdict(Counter)
    for order in (0, 1, 2):
        for i in range(order, len(train)):
            followers[train[i - order : i]][train[i]] += 1

    def probability(context: bytes, byte: int) -> float:
        shorter = probability(context[1:], byte) if context else 1 / 256
        seen = followers[context]
        if not seen:
            return shorter
        return (seen[byte] + len(seen) * shorter) / (seen.total() + len(seen))

    return sum(-log(probability(text[i - 2 : i], text[i])) for i in targets) / len(targets)


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_it_is_witten_bell_counted_by_hand(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(baseline, "_CHUNK", chunk)
    train, targets = TEXT[:70], [2, 5, 30, 71, 80, 98]
    found = order2_nats(np.frombuffer(train, np.uint8), np.frombuffer(TEXT, np.uint8), np.array(targets))
    assert found == pytest.approx(_brute_force(train, TEXT, targets), rel=1e-12)
