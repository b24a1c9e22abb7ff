"""Measures a machine: the figures of a hardware profile, by doing what the engine does.

What follows from them is in `forecast`.
"""
