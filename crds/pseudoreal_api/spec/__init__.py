"""The job as the user writes it: models of all fields, rules across fields, and a check of both without a cluster.

`resolved` derives the configuration of a phase from a spec.
"""
