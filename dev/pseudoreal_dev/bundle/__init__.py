"""Bundle for running the project's tests and benchmarks on a machine with a GPU and no network.

The tests are in `tests/gpu`, the benchmarks in `benchmarks/gpu`.
"""
