"""Estimates for a plan, before anything runs: bytes in `memory`, seconds in `time`; printed as text and drawn as a
picture.

The contents of a step are in `plan`. No module imports torch.
"""
