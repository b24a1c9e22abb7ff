"""Commands for jobs on a cluster: show them, and change them on request.

The group of all commands is `pseudoreal_trainer.cli.command`.
"""
