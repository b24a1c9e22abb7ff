"""Metrics services that receive each step's figures besides metrics.jsonl, one module each.

`training` decides which figures exist and when.
"""
