"""Bytes that a plan takes of device, host and disk, and the choice of homes that fit.

Durations are in `forecast.time`.
"""
