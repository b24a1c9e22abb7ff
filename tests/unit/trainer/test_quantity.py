import pytest
from pseudoreal_trainer.quantity import bytes_of, readable_bytes


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        (5, 5),
        ("5", 5),
        ("2Gi", 2 * 2**30),
        ("1.5Mi", 3 * 2**19),
        ("2G", 2_000_000_000),
        ("8k", 8_000),
        ("1e3", 1_000),
        ("1E3", 1_000),
        ("12E", 12 * 10**18),
        ("1500m", 2),
    ],
)
def test_quantities(quantity: int | str, expected: int) -> None:
    assert bytes_of(quantity) == expected


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
