"""Search for the fastest layouts of a phase on given hardware: candidates, a lower bound on the seconds of each, and
the search itself.

The costs of a single layout are in `plan.memory` and `estimate.time`. No module imports torch.
"""
