"""Byte counts in readable form."""


def readable_bytes(amount: float) -> str:
    """Return the amount with its binary unit: 2147483648 -> 2.00 GiB."""
    if abs(amount) < 1024:
        return f"{amount:.0f} B"
    power = next((power for power in range(1, 6) if abs(amount) < 1024 ** (power + 1)), 6)
    return f"{amount / 1024**power:.2f} {'KMGTPE'[power - 1]}iB"
