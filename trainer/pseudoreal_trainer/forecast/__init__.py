"""What a plan costs, before anything runs: its bytes in `memory`, its seconds in `time`; both as text and as a picture.

What a step does is in `plan`. Never torch.
"""
