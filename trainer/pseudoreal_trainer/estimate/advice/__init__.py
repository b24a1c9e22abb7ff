"""Advice on phases: measured trials, their arms as candidates for a job, seconds by the planner, and the decision.

Whether a job learns better with a candidate is never predicted, only measured. No module imports torch.
"""
