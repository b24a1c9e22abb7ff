"""Checks every rank and the networks between them before the first step, and names the one that is at fault. The check
runs in a process of its own beside each worker: whatever hangs in it can be killed, and nothing of it stays."""
