"""The running pod: start, heartbeats and restarts in place of the ranks; the pod's reports to the operator, /metrics
and termination message.

The program that supervises the ranks is `cli.pod`. Only `rendezvous.handler` imports torch: the module runs in
torchrun's process, and never in the supervisor.
"""
