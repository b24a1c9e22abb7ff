"""The endpoint to which running pods report: authentication, limits on clients, TLS.

Reports are interpreted in `observe` and `failures`.
"""
