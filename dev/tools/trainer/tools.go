//go:build tools

// Package trainer pins Kubeflow's Trainer, which the benchmark of the operator runs beside it. It has a module of its own, as it needs other Kubernetes modules than the cluster.
package trainer

import _ "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"
