"""Kubernetes quantities as numbers of bytes."""

from fractions import Fraction

from pseudoreal_api.base import Quantity

_SUFFIXES = {
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)},
}


def bytes_of(quantity: Quantity) -> int:
    """2Gi -> 2147483648. Rounded up, as Kubernetes does."""
    text = str(quantity)
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            return _rounded_up(Fraction(text.removesuffix(suffix)) * factor)
    return _rounded_up(Fraction(text))


def _rounded_up(amount: Fraction) -> int:
    return -(-amount.numerator // amount.denominator)


def readable_bytes(amount: float) -> str:
    """2147483648 -> 2.00 GiB"""
    if abs(amount) < 1024:
        return f"{amount:.0f} B"
    power = next((power for power in range(1, 6) if abs(amount) < 1024 ** (power + 1)), 6)
    return f"{amount / 1024**power:.2f} {'KMGTPE'[power - 1]}iB"
