"""Errors that a command shows as one line."""


class Refused(ValueError):
    """What was asked for cannot be done here; the message is for who asked."""


class UnsharedError(ValueError):
    """An error of this rank alone: it prints the error itself, because no other rank can."""


class WorkerFailed(RuntimeError):
    """A worker raised, or died; the message says which and why."""


def first_line(error: Exception) -> str:
    """The first line of what it says; its kind, if it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
