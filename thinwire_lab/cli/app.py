"""The command tree and what all commands share: how errors and Ctrl-C look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from thinwire_lab.errors import UnsharedError, WorkerFailed
from thinwire_lab.runs.versions import versions

app = typer.Typer(
    help="Data-parallel PyTorch training that sends little.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        console.print(", ".join(f"{name} {text}" for name, text in versions().items()),
                      highlight=False)  # fmt: skip
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show versions and exit."),
    ] = False,
) -> None:
    """Data-parallel PyTorch training that sends little."""


def _print_error(error: Exception) -> None:
    """Print it once: what one rank of a launcher is refused, all are. Brackets are no markup."""
    from thinwire_lab.runs.launch import is_first

    if is_first() or isinstance(error, UnsharedError):
        errors.print(f"[red]thinwire:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)


@contextmanager
def reported() -> Iterator[None]:
    """Bad input exits with 2, failed work with 1, Ctrl-C with 130; one message each."""
    try:
        yield
    except ValueError as error:
        _print_error(error)
        raise typer.Exit(2) from None
    except WorkerFailed as error:
        _print_error(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        errors.print("[red]thinwire:[/red] interrupted; all workers have ended")
        raise typer.Exit(130) from None


from thinwire_lab.cli import bench, catalogue, demo, plan, prove, results, trace, train  # noqa: E402, F401  (each registers on `app`)
