"""The API server: requests, credentials, the finalizer, and the Lease by which one operator works at a time."""
