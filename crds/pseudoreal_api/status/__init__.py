"""Status of a job, as the operator writes it and kubectl shows it.

The operator decides the values.
"""
