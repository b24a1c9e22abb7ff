"""Capacity check: whether the nodes of a cluster have room for a job's pods and for the trainer's memory estimate.
Pure.

The trainer computes the estimate.
"""
