"""The fastest layouts of a phase on given hardware: which there are, a bound of each one's seconds, and the search.

What one layout costs is in `memory` and `time`. Never torch.
"""
