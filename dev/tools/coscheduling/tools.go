//go:build tools

// Package coscheduling pins the scheduler of gangs that tests run beside the operator. It has a module of its own, as it needs other Kubernetes modules than the cluster.
package coscheduling

import _ "sigs.k8s.io/scheduler-plugins/cmd/scheduler"
