"""Constants of the model; whoever computes it must use the same."""

EPSILON = 1e-6
"""Added to the mean square in the norms."""
ROTARY_BASE = 10_000.0
