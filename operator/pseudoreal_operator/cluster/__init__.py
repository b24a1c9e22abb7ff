"""The API server: requests, watches, credentials, and the Lease by which one operator works at a time.

What is asked for, and why, the other rooms decide.
"""
