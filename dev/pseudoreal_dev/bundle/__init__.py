"""Bundle for running the project's tests and benchmarks on a machine with a GPU and no network.

The tests and benchmarks themselves are in `tests`.
"""
