//go:build tools

// Package trainer pins Kubeflow's Trainer and the JobSet that it brings, which the benchmark of the operator runs beside it. They have a module of their own, as they need other Kubernetes modules than the cluster.
package trainer

import (
	_ "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"
	_ "sigs.k8s.io/jobset"
)
