"""The command line without a new Python: what a command does, but for loading torch once more.

Its workers are forked, as everybody's are, from the one process of the session that has loaded it.
That the installed command is the same function is for `test_the_command_itself_exits_with_2`.
"""

from __future__ import annotations

import subprocess

from typer.testing import CliRunner

from thinwire_lab.cli.app import app


def thinwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a command printed, to a terminal of 80 columns, and how it ended."""
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
