import pytest
from pseudoreal_api.quantity import bytes_of, quantity_of


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
    ("amount", "expected"),
    [(0, "0"), (1023, "1023"), (1024, "1Ki"), (1536, "1536"), (3 * 2**29, "1536Mi"), (2**40, "1Ti"), (2**70, "1024Ei")],
)
def test_back(amount: int, expected: str) -> None:
    assert quantity_of(amount) == expected
    assert bytes_of(expected) == amount
