//go:build tools

// Package tools pins the server that stands for Google's object storage in tests.
package tools

import _ "github.com/fsouza/fake-gcs-server"
