from decimal import Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_api.base import Quantity
from pseudoreal_api.quantity import bytes_of, count_of, quantity_of, readable_bytes
from pydantic import TypeAdapter, ValidationError

QUANTITY: TypeAdapter[int | str] = TypeAdapter(Quantity)
FACTORS = {"": "1", "n": "1e-9", "u": "1e-6", "m": "1e-3"}
FACTORS |= {letter: f"1e{3 * (power + 1)}" for power, letter in enumerate("kMGTPE")}
FACTORS |= {f"{letter}i": str(1024 ** (power + 1)) for power, letter in enumerate("KMGTPE")}
FACTORS |= {f"{e}{sign}{power}": f"1e{sign}{power}" for e in "eE" for sign in ("", "+", "-") for power in (0, 3, 12)}
numbers = st.from_regex(r"[0-9]{1,12}(\.[0-9]{0,6})?", fullmatch=True)


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


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [(2, 2), ("2", 2), ("2.0", 2), ("2.", 2), ("1k", 1000), ("1e3", 1000), ("2000m", 2), (0, 0)],
)
def test_counts(quantity: int | str, expected: int) -> None:
    assert count_of(quantity) == expected


@pytest.mark.parametrize("quantity", ["500m", "1.5", "1e-3", "2001m", "0.1"])
def test_a_part_of_a_thing_is_no_count(quantity: str) -> None:
    with pytest.raises(ValueError, match=f"{quantity} is not a whole number"):
        count_of(quantity)


@settings(deadline=None)
@given(numbers, st.sampled_from(sorted(FACTORS)))
def test_every_form_that_the_schema_accepts_is_read(number: str, suffix: str) -> None:
    """Compared with decimal arithmetic."""
    quantity = QUANTITY.validate_python(number + suffix)
    with localcontext(prec=60):
        exact = Decimal(number) * Decimal(FACTORS[suffix])
        rounded = int(exact.to_integral_value("ROUND_CEILING"))
    assert bytes_of(quantity) == rounded
    if exact == int(exact):
        assert count_of(quantity) == int(exact)
    else:
        with pytest.raises(ValueError, match="is not a whole number"):
            count_of(quantity)


@pytest.mark.parametrize(
    "quantity", ["1e999", "1e-100", "9" * 31, "", "k", "-1", "+1", ".5", "1 Gi", "1kk", "0x1", "١"]
)
def test_what_is_no_quantity_or_too_long_is_refused(quantity: str) -> None:
    with pytest.raises(ValidationError, match="is not a quantity"):
        QUANTITY.validate_python(quantity)


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
def test_readable_bytes_takes_the_largest_unit_below_the_amount(amount: int, words: str) -> None:
    assert readable_bytes(amount) == words
