//go:build tools

// Package actionlint pins the checker of the workflows.
package actionlint

import _ "github.com/rhysd/actionlint/cmd/actionlint"
