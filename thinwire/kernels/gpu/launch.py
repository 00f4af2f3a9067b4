"""How the kernels start: a program for every so many numbers, none for nothing."""

from __future__ import annotations

from typing import Any

import triton

B = 1024  # numbers that one program takes


def launch(kernel: Any, n: int, *args: Any, **constants: Any) -> None:
    """As many programs as n numbers need, each with B of them."""
    if n:
        kernel[(triton.cdiv(n, B),)](*args, **constants, B=B)
