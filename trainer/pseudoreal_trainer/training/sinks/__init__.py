"""Metrics services for each step's figures, in addition to metrics.jsonl; one module each.

`training` decides on the figures and their steps.
"""
