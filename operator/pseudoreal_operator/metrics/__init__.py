"""Prometheus metrics of the operator itself, and the server for them.

Metrics of jobs are derived from the watch of jobs, in `loop`.
"""
