"""One phase from its start to its end: steps, learning rate, validation, saves, metrics.

How a step is made is in `engine`; which phase comes next, the operator decides.
"""
