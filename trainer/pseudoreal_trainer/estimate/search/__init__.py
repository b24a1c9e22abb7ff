"""Search for the fastest layouts of a phase on given hardware: candidates, a lower bound on the seconds of each, and
the search itself.

The costs of a single layout are in `memory` and `time`. No module imports torch.
"""
