"""How a notebook shows the result of a verb: the screen that the command line prints."""

from __future__ import annotations

import html
from importlib import import_module
from typing import ClassVar


class ShownInNotebooks:
    """The base of results that a notebook's cell shows as their verb prints them.

    ``text_by`` names the function that makes the verb's text of the result, ``module:name``; it is
    imported when the text is asked for, because ``report`` is built on the results.
    """

    text_by: ClassVar[str] = ""

    def screen(self) -> str:
        """Return what the verb prints, in 80 columns; without rich, ``str`` of the result."""
        module, _, name = self.text_by.partition(":")
        try:
            text: str = getattr(import_module(module), name)(self) if module else str(self)
        except ImportError:
            return str(self)
        return text

    def _repr_html_(self) -> str:
        """Return the screen for a notebook's cell, its columns in line (IPython's protocol)."""
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(self.screen())}</pre>'
