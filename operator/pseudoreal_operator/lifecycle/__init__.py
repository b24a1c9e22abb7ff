"""Decide the next step of a job by ordered rules. Pure.

The children that a decision asks for are rendered in `manifests`, and created in `loop`.
"""
