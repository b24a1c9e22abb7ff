"""Checks every rank and the networks between them before the first step, and names the faulty rank.

The check runs in a process of its own beside each worker: a hang can be killed, and no state is left behind.
"""
