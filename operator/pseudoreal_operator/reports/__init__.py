"""What the pods report while they run: who may, how often, and what was heard last."""
