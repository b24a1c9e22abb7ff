"""Programs that clusters have beside the operator, built for tests that run them with it. Those of the cluster itself
are elsewhere."""
