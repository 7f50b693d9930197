"""Precompiled headers: who gets them, when they are made, and where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fuselab.errors import BuildError
from fuselab.runtime import precompiled_header
from fuselab.runtime.cpp_source import CppSource, i64

SOURCE = '#include "cpu_math.h"\nvoid kernel() {}\n'


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """An empty cache, a process that has compiled nothing, and the compiler's calls."""
    calls: list[Sequence[str]] = []

    def compiled(arguments: Sequence[str], what: str) -> None:
        calls.append(arguments)
        Path(arguments[-1]).write_bytes(b"parsed")

    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path))
    monkeypatch.setattr(precompiled_header, "_compiled", 0)
    monkeypatch.setattr(precompiled_header, "_is_gcc", lambda: True)
    monkeypatch.setattr(precompiled_header, "run_compiler", compiled)
    return calls


def test_the_third_kernel_of_a_process_makes_the_file(made: list[Sequence[str]]) -> None:
    found = [precompiled_header.options_for(SOURCE, ("-O3",), "cpu") for _ in range(4)]
    assert found[:2] == [(), ()] and found[2] == found[3]
    option, header = found[2]
    assert option == "-include" and len(made) == 1 and made[0][0] == "-O3"
    assert '#include "cpu_sweep.h"' in Path(header).read_text()
    assert Path(f"{header}.gch").read_bytes() == b"parsed"


def test_a_new_process_uses_what_another_has_made(
    made: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [precompiled_header.options_for(SOURCE, ("-O3",), "cpu") for _ in range(3)]
    monkeypatch.setattr(precompiled_header, "_compiled", 0)
    assert precompiled_header.options_for(SOURCE, ("-O3",), "cpu") == found[-1]
    assert precompiled_header.options_for(SOURCE, ("-O3",), "another") == ()
    monkeypatch.setattr(precompiled_header, "_compiled", 0)
    assert precompiled_header.options_for(SOURCE, ("-O2",), "cpu") == ()
    assert len(made) == 1


def test_other_sources_and_compilers_get_none(
    made: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = '#include <cmath>\n#include "mine.h"\nvoid kernel() {}\n'
    assert [precompiled_header.options_for(own, (), "cpu") for _ in range(5)] == [()] * 5
    monkeypatch.setattr(precompiled_header, "_is_gcc", lambda: False)
    assert [precompiled_header.options_for(SOURCE, (), "cpu") for _ in range(5)] == [()] * 5
    assert not made


def test_a_header_that_does_not_compile_is_left_out(
    made: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(arguments: Sequence[str], what: str) -> None:
        raise BuildError("no")

    monkeypatch.setattr(precompiled_header, "run_compiler", fails)
    assert [precompiled_header.options_for(SOURCE, (), "cpu") for _ in range(4)] == [()] * 4


def test_a_kernel_whose_names_collide_with_the_headers_compiles_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "before.h"
    header.write_text("struct Mine {};\n")
    source = tmp_path / "kernels.cpp"
    source.write_text(
        "#include <cstdint>\nusing Mine = int32_t;\n"
        "void filled(Mine* output, int64_t count) {\n"
        "  for (int64_t i = 0; i < count; ++i) output[i] = 7;\n}\n"
    )
    monkeypatch.setattr(precompiled_header, "options_for", lambda *args: ("-include", str(header)))
    output = torch.zeros(3, dtype=torch.int32)
    CppSource(source).launch("filled", (output, i64(3)))
    assert output.tolist() == [7, 7, 7]
