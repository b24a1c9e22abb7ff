"""A training step as data: units and their homes, the layout, orders of passes, records, and the checker.

`memory` computes its bytes, `estimate` its seconds, `engine` executes it. Never imports torch.
"""
