"""Requests to the API server, and the meaning of their failures.

`view` decides what is shown of the responses.
"""
