"""Write ``module.py``: a module over the parameters of the ejected one."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Mapping

from torch import nn

from fuselab.ejection.capture import Captured, argument_name
from fuselab.ejection.fold import formatted
from fuselab.ejection.write_init import sequence_import
from fuselab.ejection.write_signature import described, has_text, option_text


def module_text(captured: Captured) -> str:
    """Return the text of ``module.py``."""
    module = captured.function
    assert isinstance(module, nn.Module)
    places = _places(module)
    held = {
        argument_name(node): places[mangled]
        for node in captured.traced.graph.find_nodes(op="placeholder")
        if (mangled := _mangled(str(node.target))) in places
    }
    inputs = {name: kind for name, kind in captured.public.items() if name not in held}
    given = ", ".join(held.get(name, name) for name in captured.public)
    annotated, fixed = _parameters(module, captured, inputs)
    checks = "".join(f"{textwrap.indent(line, ' ' * 8)}\n" for line in fixed)
    sequence = "".join(f"{line}\n" for line in sequence_import(annotated))
    imported = "import torch\n" if "= torch." in annotated else ""  # a dtype
    label = type(module).__name__
    mode, other = ("train", "eval") if module.training else ("eval", "train")
    return formatted(f'''\
"""{label} with the fused operators of this package."""

from __future__ import annotations

{sequence}from typing import Any

{imported}from torch import Tensor, nn

from . import {captured.name}


class {label}(nn.Module):
    """Computes what ``original`` computes, with its parameters, buffers and children under their
    names, so that a state_dict of one fits the other. It was ejected in .{mode}() mode."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.training = original.training
        kept = original.state_dict()
        for name, parameter in original.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in original.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in kept)
        for name, child in original.named_children():
            self.add_module(name, child)

    def forward(self, {annotated}) -> Any:
        if self.training is not {module.training}:
            raise RuntimeError("ejected in .{mode}() mode; eject the module again for .{other}()")
{checks}        return {captured.name}({given})
''')


def _parameters(
    module: nn.Module, captured: Captured, inputs: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Return the parameters of the forward as its own code has them, and the statements that check
    those which are no tensors: they have the values that the module was ejected with."""
    texts: list[str] = []
    checks: list[str] = []
    has_default = is_by_name = False
    for name, one in inspect.signature(module.forward).parameters.items():
        value = captured.given.get(name, one.default)
        if name in inputs:
            kind = inputs[name]
            if one.kind is one.VAR_POSITIONAL:
                text, is_by_name = f"*{name}: Tensor", True
            elif one.kind is one.VAR_KEYWORD:
                text = f"**{name}: Any"
            else:
                needs_default = has_default and one.kind is not one.KEYWORD_ONLY
                text = f"{name}: {kind} | None = None" if needs_default else f"{name}: {kind}"
        elif name not in captured.given and one.default is one.empty:
            continue
        elif one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            text, has_default = f"{name}: Any = None", True
            if has_text(value):
                wanted = option_text(value)
                text = f"{name}: Any = {wanted}"
                differs = f"{name} is not {wanted}" if value is None else f"{name} != {wanted}"
            else:
                wanted, given = described(value, name)
                differs = f"{name} is not None and {given} != {json.dumps(wanted)}"
            told = f"{name} must be {wanted}, as the module was ejected".replace('"', "'")
            checks.append(f'if {differs}:\n    raise ValueError("{told}")')
        else:
            continue
        if one.kind is one.KEYWORD_ONLY and not is_by_name:
            texts.append("*")
            is_by_name = True
        texts.append(text)
    return ", ".join(texts), checks


def _places(module: nn.Module) -> dict[str, str]:
    """Return the text of every parameter and buffer of ``self``, by the name that Dynamo makes of
    it."""
    found: dict[str, str] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        words = [word for word in path.split(".") if word]
        plain = all(word.isidentifier() for word in words)
        holder = ".".join(["self", *words]) if plain else f'self.get_submodule("{path}")'
        for kind, held in (("parameters", one._parameters), ("buffers", one._buffers)):
            for name in held:
                mangled = "_".join([*(f"modules_{word}" for word in words), kind, name])
                found[re.sub(r"\W", "_", mangled)] = f"{holder}.{name}"
    return found


def _mangled(target: str) -> str:
    """Return Dynamo's name of an argument without what stands for the module itself."""
    match = re.match(r"^[LG]_\w*?_((?:modules|parameters|buffers)_\w*?)_*$", target)
    return match[1] if match else ""
