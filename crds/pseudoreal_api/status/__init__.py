"""The status of a job, as the operator writes it and kubectl shows it.

How it is decided is the operator's business.
"""
