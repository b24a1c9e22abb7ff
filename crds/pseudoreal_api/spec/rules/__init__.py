"""The rules across fields, written once in CEL, one file a subject: the API server and `spec.check` evaluate them.

What one field may hold is said in its model, and what may change in a job in `spec.changes`.
"""
