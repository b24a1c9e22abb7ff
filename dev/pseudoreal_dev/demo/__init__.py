"""A user's first steps, automated: install the chart, apply an example, follow the job to its end.

The demo runs on the local cluster, or on a cluster of the user.
"""
