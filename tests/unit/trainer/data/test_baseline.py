from collections import Counter, defaultdict
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_trainer.data import baseline
from pseudoreal_trainer.data.baseline import order2_nats
from pseudoreal_trainer.data.corpus import Bytes

TEXT = b"in the beginning was the word, and the word was with the king; and so it was in the end of the day."


def _brute_force(train: bytes, windows: list[bytes]) -> float:
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

    surprises = [-log(probability(w[i - 2 : i], w[i])) for w in windows for i in range(2, len(w))]
    return sum(surprises) / len(surprises)


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_baseline_equals_witten_bell_counted_by_hand(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(baseline, "_CHUNK", chunk)
    train, windows = TEXT[:70], [TEXT[5:15], TEXT[68:78], TEXT[89:99]]
    found = order2_nats(np.frombuffer(train, np.uint8), np.array([list(window) for window in windows], np.uint8))
    assert found == pytest.approx(_brute_force(train, windows), rel=1e-12)


class _Counted:
    """A text that counts the bytes read from it."""

    def __init__(self, text: Bytes) -> None:
        self._text, self.asked = text, 0

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, part: slice) -> Bytes:
        found = self._text[part]
        self.asked += len(found)
        return found


def test_a_large_corpus_is_not_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for the one that counts: it reads at most three times 16 MiB, for any length of the text. Scaled
    down here."""
    monkeypatch.setattr(baseline, "_CHUNK", 1 << 10)
    text: Any = _Counted(np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=8 << 30))
    order2_nats(text, np.zeros((3, 10), np.uint8))
    assert text.asked <= 3 * 16 * ((1 << 10) + 2)
