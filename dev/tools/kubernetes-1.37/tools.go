//go:build tools

// Package kubernetes pins the API server and the controllers of another minor version, on which selected tests run again.
package kubernetes

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
)
