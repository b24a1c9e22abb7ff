//go:build tools

// Package kueue pins the queue that tests run beside the operator. It has a module of its own, as it needs other Kubernetes modules than the cluster.
package kueue

import _ "sigs.k8s.io/kueue/cmd/kueue"
