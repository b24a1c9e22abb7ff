"""Pieces of updates in tests: small ones, so that a short vector has several."""

PIECE = 1 << 14
"""Number of elements of a piece."""
