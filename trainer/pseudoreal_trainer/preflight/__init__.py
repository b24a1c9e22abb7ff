"""Checks every rank and the networks between ranks before the first step, and names the faulty rank.

The check runs in a process of its own beside each rank: a check that hangs can be killed, and leaves no state behind.
"""
