"""Pure functions from the API server's objects to output: no requests, no clock, no terminal.

`pseudoreal` has the requests, `commands` their callers.
"""
