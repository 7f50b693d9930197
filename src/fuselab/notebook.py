"""How a notebook shows the result of a verb: the screen that the command line prints."""

from __future__ import annotations

import html


class ShownInNotebooks:
    """The base of results that a notebook's cell shows as their verb prints them."""

    def screen(self) -> str:
        """Return what the verb prints, in 80 columns."""
        return str(self)

    def _repr_html_(self) -> str:
        """Return the screen for a notebook's cell, its columns in line (IPython's protocol)."""
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(self.screen())}</pre>'
