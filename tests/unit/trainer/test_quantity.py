import pytest
from pseudoreal_trainer.quantity import readable_bytes


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**50, "1.00 PiB"),
        (2**70, "1024.00 EiB"),
    ],
)
def test_readable(amount: int, words: str) -> None:
    assert readable_bytes(amount) == words
