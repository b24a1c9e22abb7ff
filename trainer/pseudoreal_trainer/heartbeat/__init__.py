"""What a rank says of itself while it runs: where it is, since when, and which of its threads failed first.

How that reaches the operator is in `pod`.
"""
