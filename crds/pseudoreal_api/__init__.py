"""The contract between the users, the API server, the operator and the trainer.

Everything that crosses a border of the system is a model of this package; it imports neither kopf nor torch.
"""
