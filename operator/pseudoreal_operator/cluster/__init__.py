"""The API server: requests, watches, credentials, and the Lease by which one operator works at a time.

Other folders decide which requests are made, and why.
"""
