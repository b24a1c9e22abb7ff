"""Conditions and events of a job, for people and programs. Pure.

The model of the status is in the contract.
"""
