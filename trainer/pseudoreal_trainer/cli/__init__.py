"""Programs: the main process of a pod, a rank, and the command `pseudoreal` with its local commands.

The commands for a cluster are in pseudoreal_client, which uses `common`, `job_file` and `plan_display`. No other
package of pseudoreal_trainer imports these modules.
"""
