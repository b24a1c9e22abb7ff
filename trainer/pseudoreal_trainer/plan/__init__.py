"""What a training step does, as data: units and their homes, the layout, orders of passes, records, and their checker.

What it costs is in `forecast`; what carries it out, in `engine`. Never torch.
"""
