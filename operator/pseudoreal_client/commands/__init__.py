"""The commands: each reads what it needs, asks a pure function of `view`, and prints or sends what that says.

How they come together is in `command.py`.
"""
