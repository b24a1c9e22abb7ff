"""Access to the API server: requests, watches, credentials, and leader election by a Lease.

Other folders decide which requests are made, and why.
"""
