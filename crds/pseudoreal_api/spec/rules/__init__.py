"""Rules across fields, written once in CEL, and evaluated by the API server (`publish.policy`) and by `spec.check`; one
file per subject.

The model of a field defines its own values; `spec.changes` defines permitted changes.
"""
