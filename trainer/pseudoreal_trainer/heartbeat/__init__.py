"""What a rank says of itself while it runs: whether it works or waits, since when, and which thread failed first.

How that reaches the operator is in `pod`.
"""
