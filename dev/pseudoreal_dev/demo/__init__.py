"""What a user would do: install the chart, apply an example, follow it to the end.

It works on the local cluster, or on one that the user names.
"""
