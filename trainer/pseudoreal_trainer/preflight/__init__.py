"""Checks every rank and the networks between ranks before the first step, and names the faulty rank.

Each rank's check runs in a separate process: a check that hangs can be killed, and no check leaves state in the rank.
"""
