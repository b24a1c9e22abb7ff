"""State of a job in one line, for a log. Pure."""

from datetime import datetime

from pseudoreal_client.text import duration
from pseudoreal_client.view.seen import SeenJob, cleaned, share


def story(job: SeenJob, now: datetime) -> str:
    """Return the line. Two equal lines mean: nothing worth reporting has happened in between."""
    status, progress = job.status, job.status.progress
    parts = [status.state, f"phase {status.current_phase}" if status.current_phase else ""]
    if progress and not job.is_over:
        left = job.remaining_of_job(now)
        parts += [f"step {share(progress)}", f"loss {progress.loss}" if progress.loss else ""]
        parts += [f"{duration(left)} left"] if left is not None and status.state == "Training" else []
    elif job.reason:
        parts.append(cleaned(job.reason.message))
    return "  ".join(filter(None, parts))
