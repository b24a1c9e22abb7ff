"""Pure functions from the API server's objects to output and patches: no requests, no clock, no terminal.

`cluster` has the requests, `commands` their callers.
"""
