"""Of the model; whoever computes it must use the same."""

EPSILON = 1e-6
"""Of the norms."""
ROTARY_BASE = 10_000.0
