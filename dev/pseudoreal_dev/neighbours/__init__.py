"""Third-party controllers and schedulers beside the operator, built for combined tests.

The cluster's own programs are in `cluster`.
"""
