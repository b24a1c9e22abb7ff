"""Measurement of a machine: the figures of a hardware profile, from the operations of the engine.

Predictions from these figures are in `estimate`.
"""
