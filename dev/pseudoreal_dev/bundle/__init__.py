"""What a machine with a GPU and no network is given to run our tests and benchmarks.

The tests and benchmarks themselves stand in `tests`.
"""
