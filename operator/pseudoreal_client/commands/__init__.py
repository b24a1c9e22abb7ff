"""The commands. Each reads objects, calls a pure function of `view`, and prints or sends the result.

`command.py` combines them into one group.
"""
