"""The contract between users, API server, operator and trainer.

All data crossing a boundary of the system is a model of this package. The package imports neither kopf nor torch.
`kubernetes_requests` builds the requests that the operator and the command line send to the API server.
"""
