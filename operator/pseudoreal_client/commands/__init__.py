"""Commands for jobs on a cluster. Each command reads objects, calls a pure function of `view`, and prints or sends the
result.

`trainer/pseudoreal_trainer/cli/command.py` combines these and the local commands into one group.
"""
