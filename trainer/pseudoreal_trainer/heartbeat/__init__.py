"""State of a running rank: whether it works or waits, since when, and which thread failed first.

`pod` carries it to the operator.
"""
