"""The job as a user writes it: models of every field, the rules across fields, and a check of both without a cluster.

What follows from a spec for one phase is in `resolved`.
"""
