//go:build tools

// Package jobset pins the JobSet controller, which Kubeflow's Trainer needs in the benchmark beside the operator. It has a module of its own, as it does not build with the controller-runtime of the Trainer.
package jobset

import _ "sigs.k8s.io/jobset"
