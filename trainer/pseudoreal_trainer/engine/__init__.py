"""Executes step plans: the working copies, gradients, messages and updates of one rank. docs/engine.md walks through
it. What a step does is decided in `plan`, and when one is made, in `training`."""
