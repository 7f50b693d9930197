"""The guard of PyTorch's functions: what torch.compile replaces itself, and what nobody may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.mutation_guard import install_generation_tagging_init

from fuselab.prove.guard import Guard

NEEDED = "___needs_generation_tag_patch"  # what torch.compile notes in nn.Module


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """A guard in a process in which nothing was compiled."""
    monkeypatch.setattr(nn.Module, "__init__", nn.Module.__init__)
    monkeypatch.setattr(nn.Module, "__setstate__", nn.Module.__setstate__)
    monkeypatch.setattr(nn.Module, NEEDED, True, raising=False)
    yield Guard()


def test_what_a_first_compilation_replaces_stays(guard: Guard) -> None:
    install_generation_tagging_init()
    of_dynamo = nn.Module.__init__
    assert guard.undo() == []
    assert guard.undo() == []
    assert nn.Module.__init__ is of_dynamo


def test_another_constructor_of_layers_is_put_back(guard: Guard) -> None:
    before = nn.Module.__init__
    nn.Module.__init__ = lambda self, *args, **kwargs: before(self)  # type: ignore[method-assign]
    assert guard.undo() == ["torch.nn.modules.module.Module.__init__"]
    assert nn.Module.__init__ is before


def test_a_function_beside_those_of_the_compiler_is_put_back(guard: Guard) -> None:
    before = torch.relu
    install_generation_tagging_init()
    torch.relu = torch.sigmoid
    assert guard.undo() == ["torch.relu"]
    assert torch.relu is before and guard.undo() == []
