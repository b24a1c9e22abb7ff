"""Executes step plans: working copies, gradients, messages and updates of one rank; docs/engine.md walks through it.
`plan` decides the content of a step, `training` when steps run."""
