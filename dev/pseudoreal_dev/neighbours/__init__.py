"""Programs that clusters have beside the operator, which tests run with it."""
