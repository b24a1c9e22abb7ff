"""Third-party controllers and schedulers that clusters run beside the operator, built for tests that combine them with
the operator.

The cluster's own programs are in `cluster`.
"""
