"""Messages between operator and running pods: reports, termination messages, contract number.

`resolved` has a pod's initial configuration.
"""
