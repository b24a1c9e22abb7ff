"""The endpoint to which the pods report while they run: who may, and how often."""
