"""The commands. Each reads objects, calls a pure function of `view`, and prints or sends the result.

`trainer/pseudoreal_trainer/cli/command.py` combines them and the local commands into one group.
"""
