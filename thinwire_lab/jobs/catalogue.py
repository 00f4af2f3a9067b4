"""The table of jobs."""

from __future__ import annotations

from thinwire.spelling import meant
from thinwire_lab.jobs import bert, language, speech, vision
from thinwire_lab.jobs.job import Job

JOBS: dict[str, Job] = vision.JOBS | language.JOBS | speech.JOBS | bert.JOBS


def find(name: str) -> Job:
    """A job by its name."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}; known are {', '.join(JOBS)}{meant(name, JOBS)}")
    return JOBS[name]
