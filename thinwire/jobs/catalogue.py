"""The table of jobs."""

from __future__ import annotations

from thinwire.jobs import hearing, language, pictures, understanding
from thinwire.jobs.job import Job
from thinwire.spelling import meant

JOBS: dict[str, Job] = pictures.JOBS | language.JOBS | hearing.JOBS | understanding.JOBS


def find(name: str) -> Job:
    """A job by its name."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; known are {', '.join(JOBS)}{meant(name, JOBS)}")
    return JOBS[name]
