//go:build tools

// Package trainingoperator pins Kubeflow's first training operator, which the benchmark of the operator runs beside it. It has a module of its own, as it needs other Kubernetes modules than the cluster.
package trainingoperator

import _ "github.com/kubeflow/training-operator/cmd/training-operator.v1"
