"""Has every part of a docstring begin a paragraph of its own on the pages of the reference.

In the source the parts (**Shapes**, **Saves**, …) and the descriptions of arguments (`name: …`) follow one another line
by line; Markdown would run them together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

BEGINS = re.compile(
    r"\n(?=\*\*(?:Shapes|Saves|Recomputes|Raises|Source)\*\*|[a-z_]+(?:, [a-z_]+)*: )",
)


class Paragraphs(griffe.Extension):
    """Puts an empty line before each part."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = BEGINS.sub("\n\n", obj.docstring.value)
