"""A training step as data: units and their homes, the layout, orders of passes, records, and the checker.

`forecast` computes the cost of a step, `engine` executes it. Never imports torch.
"""
