"""Training of one phase: the loop over steps, learning rate, validation, checkpoints and metrics.

`engine` runs a single step; the operator decides which phase runs next.
"""
