"""What a pass sees of a job, and where the job is. Pure, but for the requests.

What it means is judged in `failures` and `lifecycle`.
"""
