"""Bytes that a plan takes of device, host and disk, and the choice of homes that fit.

The engine allocates by these formulas. Durations are in `estimate.time`.
"""
