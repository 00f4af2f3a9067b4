"""For the reference: the `Example:` of a docstring becomes a block of code."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n((?:(?:[ \t]+.*)?\n?)+)", re.MULTILINE)


def block(found: re.Match[str]) -> str:
    """The lines below `Example:`, without prompts."""
    code = re.sub(r"^(>>>|\.\.\.) ?", "", textwrap.dedent(found[1]).strip(), flags=re.MULTILINE)
    return f"**Example**\n\n```python\n{code}\n```\n\n"


class Examples(griffe.Extension):
    """Loaded by mkdocs.yml."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(block, obj.docstring.value)
