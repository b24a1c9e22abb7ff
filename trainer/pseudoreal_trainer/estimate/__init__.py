"""Estimates for a plan, before anything runs: seconds in `time`, the fastest layout in `search`; report and trace.

The bytes of a plan are in `plan.memory`. No module imports torch.
"""
