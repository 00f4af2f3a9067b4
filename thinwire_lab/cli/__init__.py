"""The command line: `thinwire demo`, `thinwire bench`. The only room that prints."""

from __future__ import annotations

import errno
import os
import sys


def main() -> None:
    """The `thinwire` command; exit codes: 0 done, 1 the work failed, 2 the call was wrong,
    3 `prove` found an assumption violated, 130 Ctrl-C."""
    try:
        _run()
    except KeyboardInterrupt:  # while torch is imported, which takes seconds
        sys.stderr.write("thinwire: interrupted\n")
        sys.exit(130)


def _run() -> None:
    try:
        from thinwire_lab.cli.app import app
    except ModuleNotFoundError as missing:
        sys.exit(f"thinwire: the command line needs {missing.name}: pip install 'thinwire[demo]'")
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more as it ends
        sys.stderr.write(f"thinwire: cannot write its output: {error.strerror}\n")
        sys.exit(2)
