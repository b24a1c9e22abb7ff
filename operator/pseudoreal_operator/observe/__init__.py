"""Observed state of a job, and the stage that it is at. Pure, except for the requests.

Conclusions are drawn in `failures` and `lifecycle`.
"""
