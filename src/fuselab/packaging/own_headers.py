"""Put the headers beside a ``.cu`` file into its text: a package has one file of CUDA kernels."""

from __future__ import annotations

import re
from pathlib import Path

from fuselab.inspect.assembly.cuda_compile import text_of

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)


def with_own_headers(path: Path) -> str:
    """Return the text of a file with each header that lies in its folder, or in that of a header
    that includes it, in place of its first ``#include``. Other headers stay included."""
    seen: set[Path] = set()

    def inlined(file: Path) -> str:
        def text_of_header(match: re.Match[str]) -> str:
            header = (file.parent / match[1]).resolve()
            if not header.is_file():
                return match[0]
            if header in seen:
                return ""
            seen.add(header)
            return _ONCE.sub("", inlined(header))

        return _INCLUDE.sub(text_of_header, text_of(file))

    return inlined(path)
