"""Requests to the API server, and the meaning of their failures.

`view` selects the shown parts of the responses.
"""
