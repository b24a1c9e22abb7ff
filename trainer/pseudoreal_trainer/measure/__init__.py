"""Measures a machine: the figures of a hardware profile, by doing what the engine does."""
