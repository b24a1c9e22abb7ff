"""Requests to the API server, and what their failures mean.

What is shown of the answers is decided in `view`.
"""
