"""Conversion of Kubernetes quantities to numbers and back, and byte counts in readable form."""

from fractions import Fraction

from pseudoreal_api.base import Quantity

_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_SUFFIXES = {
    **{unit: Fraction(factor) for unit, factor in _BINARY.items()},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)},
}


def bytes_of(quantity: Quantity) -> int:
    """Return the bytes of a quantity, rounded up like Kubernetes does: 2Gi -> 2147483648."""
    amount = amount_of(quantity)
    return -(-amount.numerator // amount.denominator)


def count_of(quantity: Quantity) -> int:
    """Return the count of a quantity: 1k -> 1000, 2000m -> 2. Raises ValueError for a fraction."""
    amount = amount_of(quantity)
    if amount.denominator != 1:
        raise ValueError(f"{quantity} is not a whole number")
    return amount.numerator


def quantity_of(amount: int) -> str:
    """Return bytes as a quantity in the largest binary unit without a fraction: 2147483648 -> 2Gi."""
    units = [unit for unit, factor in _BINARY.items() if amount and amount % factor == 0]
    return f"{amount // _BINARY[units[-1]]}{units[-1]}" if units else str(amount)


def amount_of(quantity: Quantity) -> Fraction:
    """Return the exact amount of a quantity: 500m -> 1/2."""
    text = str(quantity)
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * factor
    return Fraction(text)


def readable_bytes(amount: float) -> str:
    """Return the amount with its binary unit: 2147483648 -> 2.00 GiB."""
    if abs(amount) < 1024:
        return f"{amount:.0f} B"
    power = next((power for power in range(1, 6) if abs(amount) < 1024 ** (power + 1)), 6)
    return f"{amount / 1024**power:.2f} {'KMGTPE'[power - 1]}iB"
