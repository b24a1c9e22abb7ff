"""Messages between operator and running pods: reports, termination messages, contract number.

`resolved` has the configuration that a pod receives at its start.
"""
