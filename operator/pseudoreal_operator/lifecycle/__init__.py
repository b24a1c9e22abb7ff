"""What to do next about a job: the rules, in their order. Pure.

The children that it asks for are rendered in `manifests`, and made in `loop`.
"""
