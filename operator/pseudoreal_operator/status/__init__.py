"""What people and programs read of a job: its conditions and its events. Pure.

The model of the status is in the contract.
"""
