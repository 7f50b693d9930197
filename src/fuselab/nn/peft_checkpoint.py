"""Adapters to and from checkpoints of the peft library (huggingface.co/docs/peft).

A checkpoint is a folder: ``adapter_config.json``, and ``adapter_model.safetensors`` or
``adapter_model.bin`` with two tensors per layer, ``base_model.model.NAME.lora_A.weight`` (r, K) and
``base_model.model.NAME.lora_B.weight`` (N, r).
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentError, DataError, MissingDependencyError, OutputError
from fuselab.nn.lora_linear import (
    LoRALinear,
    freeze_all_but_adapters,
    is_finite,
    replace_layer,
)

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
TORCH = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of every ``LoRALinear`` in ``model`` as peft would.

    They are written as safetensors if that package is installed, else with ``torch.save``; peft
    reads both. Ranks and alphas may differ from layer to layer. A fused activation is not saved.

    Raises:
        ArgumentError: the model has no ``LoRALinear`` inside.
        OutputError: the folder cannot be written; files appear complete or not at all.
    """
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and isinstance(module, LoRALinear)
    }
    if not layers:
        raise ArgumentError(
            "save_adapters: the model has no LoRALinear; add_adapters puts them in."
        )
    tensors = {}
    for name, layer in layers.items():
        for letter, factor in (("A", layer.lora_a), ("B", layer.lora_b)):
            # A separate copy each, because safetensors accepts no tensor twice.
            copy = factor.detach().cpu().clone(memory_format=torch.contiguous_format)
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = copy
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write_tensors(Path(folder), tensors)
        with _Complete(Path(folder) / CONFIG) as path:
            path.write_text(json.dumps(_config_of(layers), indent=2))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}.") from error


def load_adapters(model: nn.Module, folder: str | Path) -> nn.Module:
    """Read a peft checkpoint into ``model``, in place; returns it.

    Every layer that the checkpoint names becomes a ``LoRALinear`` with the checkpoint's rank and
    alpha (also of rank-stabilised LoRA), in the dtype of the layer's weight; a layer that is a
    ``LoRALinear`` already keeps its activation. All parameters but the adapters' are frozen.
    Dropout is not part of inference, and training here does not use it.

    Raises:
        DataError: a file is missing or malformed, the checkpoint has something other than plain
            LoRA of linear layers, or the model has no such layer. The model is then unchanged.
        MissingDependencyError: safetensors is not installed.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    factors: dict[str, dict[str, Tensor]] = {}
    tensors = _read_tensors(folder)
    if not isinstance(tensors, dict) or not tensors:
        raise DataError(f"{folder}: the checkpoint holds no adapter.")
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(str(key))
        if match is None:
            raise DataError(
                f"{folder}: '{key}' is not an adapter of a linear layer; expected "
                "base_model.model.NAME.lora_A.weight or lora_B.weight."
            )
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_sparse:
            raise DataError(f"{folder}: '{key}' is no dense tensor of a floating dtype.")
        factors.setdefault(match[1], {})[match[2]] = tensor
    adapters = {name: _adapter(model, name, pair, config) for name, pair in factors.items()}
    layers: dict[nn.Module, LoRALinear] = {}
    for name, adapter in adapters.items():  # All adapters fit; only from here on the model changes.
        layers.setdefault(adapter.module, adapter.wrapped())
        replace_layer(model, name, layers[adapter.module])
    freeze_all_but_adapters(model)
    return model


def _config_of(layers: dict[str, LoRALinear]) -> dict[str, Any]:
    """Return the configuration from which peft builds the same adapters around the same model."""
    first = next(iter(layers.values()))

    def others(attribute: str) -> dict[str, float]:
        usual = getattr(first, attribute)
        return {
            f"^{re.escape(name)}": getattr(layer, attribute)
            for name, layer in layers.items()
            if getattr(layer, attribute) != usual
        }

    return {
        "peft_type": "LORA",
        "r": first.rank,
        "lora_alpha": first.alpha,
        "rank_pattern": others("rank"),
        "alpha_pattern": others("alpha"),
        # A single string is a regular expression for the whole name, so no other layer matches.
        "target_modules": "|".join(map(re.escape, layers)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }


@dataclass(frozen=True)
class _Adapter:
    """One layer's adapter as the checkpoint has it, and the module it fits."""

    module: nn.Linear | LoRALinear
    alpha: float
    lora_a: Tensor
    lora_b: Tensor

    @torch.no_grad()
    def wrapped(self) -> LoRALinear:
        activation = getattr(self.module, "activation", "identity")
        layer = LoRALinear(self.module, self.lora_a.shape[0], self.alpha, activation)
        layer.lora_a.copy_(self.lora_a)
        layer.lora_b.copy_(self.lora_b)
        return layer


def _adapter(
    model: nn.Module, name: str, pair: dict[str, Tensor], config: dict[str, Any]
) -> _Adapter:
    """Return the adapter of the layer ``name``. Raises DataError if it does not fit the layer."""
    module = dict(model.named_modules(remove_duplicate=False)).get(name)
    if not isinstance(module, LoRALinear) and type(module) is not nn.Linear:
        found = "does not exist" if module is None else f"is a {type(module).__name__}"
        raise DataError(f"the checkpoint adapts '{name}', which {found} in the model.")
    if pair.keys() != {"A", "B"}:
        raise DataError(f"the checkpoint has lora_{min(pair)} of '{name}' and not the other half.")
    rank = pair["B"].shape[-1] if pair["B"].dim() else 0
    columns, inner = module.weight.shape
    if pair["A"].shape != (rank, inner) or pair["B"].shape != (columns, rank) or rank < 1:
        raise DataError(
            f"the checkpoint's adapter of '{name}' has shapes {tuple(pair['A'].shape)} and "
            f"{tuple(pair['B'].shape)}; expected (r, {inner}) and ({columns}, r)."
        )
    alpha = _pattern_value(config.get("alpha_pattern"), name, config["lora_alpha"])
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)  # its scale is alpha / sqrt(r)
    return _Adapter(module, alpha, pair["A"], pair["B"])


def _pattern_value(pattern: dict[str, float] | None, name: str, usual: float) -> float:
    """Return the value of the first key that ends the layer's name, as peft matches them."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return usual


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise DataError(f"{path}: expected an object with peft_type 'LORA'.")
    if not is_finite(config.get("lora_alpha")):
        raise DataError(f"{path}: 'lora_alpha' is {config.get('lora_alpha')!r}; expected a number.")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(map(is_finite, pattern.values())):
        raise DataError(f"{path}: 'alpha_pattern' is {pattern!r}; expected numbers by name.")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise DataError(
                f"{path}: '{key}' of 'alpha_pattern' is no regular expression: {error}."
            ) from error
    for option in ("use_dora", "fan_in_fan_out"):
        if config.get(option):
            raise DataError(f"{path}: '{option}' is set; expected plain LoRA of nn.Linear layers.")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / SAFETENSORS
    if path.exists():
        if importlib.util.find_spec("safetensors") is None:
            raise MissingDependencyError.of_extra(f"{path} needs", "safetensors", "checkpoints")
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}.") from error
    path = folder / TORCH
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return tensors
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write one of the two formats; remove an older file of the other, which would be read
    instead."""
    if importlib.util.find_spec("safetensors") is None:
        with _Complete(folder / TORCH) as path:
            torch.save(tensors, path)
        (folder / SAFETENSORS).unlink(missing_ok=True)
        return
    from safetensors.torch import save_file

    with _Complete(folder / SAFETENSORS) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    (folder / TORCH).unlink(missing_ok=True)


class _Complete:
    """A file written under another name and renamed when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self.partial

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self.partial.replace(self.path)
        else:
            self.partial.unlink(missing_ok=True)
