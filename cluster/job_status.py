"""``hsdump status --job ID``: how a Ray job of ours ended, with its own exit code."""

from __future__ import annotations

import os

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from storage.errors import ConfigError, ResourceError

STILL_RUNNING = 3
STOPPED = 1
_HERE = "http://127.0.0.1:8265"


def job_status(job: str) -> tuple[str, int]:
    """One line about a job, and the exit code of its run.

    Args:
        job: its submission id.

    Raises:
        ResourceError: no job server answers.
        ConfigError: it knows no such job.
    """
    url = os.environ.get("RAY_API_SERVER_ADDRESS", _HERE)
    try:
        details = JobSubmissionClient(url).get_job_info(job)
    except ConnectionError as error:
        raise ResourceError(
            f"no job server answers at {url}: {' '.join(str(error).split())}. Set RAY_API_SERVER_ADDRESS (and "
            "RAY_AUTH_MODE=token), and bring it here with `ray dashboard`"
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"--job {job}: {' '.join(str(error).split())}; `ray job list` shows what there is"
        ) from error
    return f"job {job}: {details.status}, exit code {exit_code(details)}; {details.message}", exit_code(
        details
    )


def exit_code(details: JobDetails) -> int:
    """The exit code of the run that the job was; Ray's own commands show less. Pure."""
    if not details.status.is_terminal():
        return STILL_RUNNING
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return STOPPED
    return details.driver_exit_code or 1
