"""Layers of torch.nn without products, as the functions that they call.

A layer stands here if its forward is one function of its input, its parameters and its settings. So
it can be part of a kernel that is written for the operations around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Form:
    """A layer's forward: the function, and its arguments beside the input.

    ``tensors`` gives the layer's attribute for a parameter of the function, ``values`` a value. The
    function writes over the tensors ``updated``, and the layer adds 1 to its ``counters``.
    """

    function: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    updated: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The plain name of the function: ``layer_norm``."""
        return self.function.rpartition(".")[2]


def form_of(layer: nn.Module) -> Form | None:
    """Return what a layer computes now, or None if it is no single function, or has effects beside
    new running statistics."""
    if "forward" in vars(layer):
        return None
    make = _FORMS.get(type(layer))
    return make(layer) if make is not None else None


def _functional(name: str, *settings: str, **renamed: str) -> Callable[[Any], Form | None]:
    """Return the form of a function of ``torch.nn.functional`` and the layer's ``settings``;
    ``renamed`` gives the setting for a parameter with another name."""

    def make(layer: Any) -> Form | None:
        values = {setting: getattr(layer, setting) for setting in settings}
        values |= {key: getattr(layer, setting) for key, setting in renamed.items()}
        return Form(f"torch.nn.functional.{name}", values=values)

    return make


def _along_a_dim(name: str) -> Callable[[Any], Form | None]:
    """Return the form of a softmax; without a dim it depends on the input's rank."""
    make = _functional(name, "dim")
    return lambda layer: make(layer) if layer.dim is not None else None


def _tensors(layer: Any, *names: str) -> dict[str, str]:
    return {name: name for name in names if getattr(layer, name, None) is not None}


def _layer_norm(layer: nn.LayerNorm) -> Form:
    return Form(
        "torch.nn.functional.layer_norm",
        _tensors(layer, "weight", "bias"),
        {"normalized_shape": tuple(layer.normalized_shape), "eps": layer.eps},
    )


def _rms_norm(layer: nn.RMSNorm) -> Form:
    return Form(
        "torch.nn.functional.rms_norm",
        _tensors(layer, "weight"),
        {"normalized_shape": tuple(layer.normalized_shape), "eps": layer.eps},
    )


def _group_norm(layer: nn.GroupNorm) -> Form:
    return Form(
        "torch.nn.functional.group_norm",
        _tensors(layer, "weight", "bias"),
        {"num_groups": layer.num_groups, "eps": layer.eps},
    )


def _batch_norm(layer: Any) -> Form | None:
    tensors = _tensors(layer, "running_mean", "running_var", "weight", "bias")
    has_statistics = "running_mean" in tensors
    if layer.training and has_statistics:
        if layer.momentum is None or not layer.track_running_stats:
            return None  # an average over all batches depends on their number, a value
        counters = _tensors(layer, "num_batches_tracked")
        return _updating("batch_norm", layer, tensors, "training", *counters)
    values: dict[str, Any] = {"training": not has_statistics, "eps": layer.eps}
    if not has_statistics:
        values |= {"running_mean": None, "running_var": None}
    return Form("torch.nn.functional.batch_norm", tensors, values)


def _updating(
    name: str, layer: Any, tensors: Mapping[str, str], training: str, *counters: str
) -> Form:
    """Return the form of a normalisation that updates its running statistics; ``training`` names
    the parameter by which it is told."""
    values = {training: True, "momentum": layer.momentum, "eps": layer.eps}
    statistics = ("running_mean", "running_var")
    return Form(f"torch.nn.functional.{name}", tensors, values, statistics, counters)


def _instance_norm(layer: Any) -> Form | None:
    tensors = _tensors(layer, "running_mean", "running_var", "weight", "bias")
    if layer.training and "running_mean" in tensors:
        return _updating("instance_norm", layer, tensors, "use_input_stats")
    values = {"use_input_stats": "running_mean" not in tensors, "eps": layer.eps}
    return Form("torch.nn.functional.instance_norm", tensors, values)


def _prelu(layer: nn.PReLU) -> Form:
    return Form("torch.nn.functional.prelu", _tensors(layer, "weight"))


def _avg_pool(dims: int, *settings: str) -> Callable[[Any], Form | None]:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", *settings)
    return _functional(f"avg_pool{dims}d", *names)


def _max_pool(dims: int) -> Callable[[Any], Form | None]:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    make = _functional(f"max_pool{dims}d", *names)
    return lambda layer: None if layer.return_indices else make(layer)


def _dropout(name: str) -> Callable[[Any], Form | None]:
    """Return the form of a dropout: outside of training, or where it drops nothing, its input."""

    def make(layer: Any) -> Form | None:
        if not layer.training or layer.p == 0:
            return Form("identity")
        return Form(f"torch.nn.functional.{name}", values={"p": layer.p, "training": True})

    return make


_FORMS: dict[type[nn.Module], Callable[[Any], Form | None]] = {
    nn.AdaptiveAvgPool1d: _functional("adaptive_avg_pool1d", "output_size"),
    nn.AdaptiveAvgPool2d: _functional("adaptive_avg_pool2d", "output_size"),
    nn.AdaptiveAvgPool3d: _functional("adaptive_avg_pool3d", "output_size"),
    nn.AlphaDropout: _dropout("alpha_dropout"),
    nn.AvgPool1d: _avg_pool(1),
    nn.AvgPool2d: _avg_pool(2, "divisor_override"),
    nn.AvgPool3d: _avg_pool(3, "divisor_override"),
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.CELU: _functional("celu", "alpha"),
    nn.Dropout: _dropout("dropout"),
    nn.Dropout1d: _dropout("dropout1d"),
    nn.Dropout2d: _dropout("dropout2d"),
    nn.Dropout3d: _dropout("dropout3d"),
    nn.ELU: _functional("elu", "alpha"),
    nn.FeatureAlphaDropout: _dropout("feature_alpha_dropout"),
    nn.Flatten: lambda layer: Form(
        "torch.flatten", values={"start_dim": layer.start_dim, "end_dim": layer.end_dim}
    ),
    nn.GELU: _functional("gelu", "approximate"),
    nn.GLU: _functional("glu", "dim"),
    nn.GroupNorm: _group_norm,
    nn.Hardshrink: _functional("hardshrink", "lambd"),
    nn.Hardsigmoid: _functional("hardsigmoid"),
    nn.Hardswish: _functional("hardswish"),
    nn.Hardtanh: _functional("hardtanh", "min_val", "max_val"),
    nn.InstanceNorm1d: _instance_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.InstanceNorm3d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.LeakyReLU: _functional("leaky_relu", "negative_slope"),
    nn.LocalResponseNorm: _functional("local_response_norm", "size", "alpha", "beta", "k"),
    nn.LogSigmoid: _functional("logsigmoid"),
    nn.LogSoftmax: _along_a_dim("log_softmax"),
    nn.MaxPool1d: _max_pool(1),
    nn.MaxPool2d: _max_pool(2),
    nn.MaxPool3d: _max_pool(3),
    nn.Mish: _functional("mish"),
    nn.PReLU: _prelu,
    nn.PixelShuffle: _functional("pixel_shuffle", "upscale_factor"),
    nn.PixelUnshuffle: _functional("pixel_unshuffle", "downscale_factor"),
    nn.RMSNorm: _rms_norm,
    nn.ReLU: _functional("relu"),
    nn.ReLU6: _functional("relu6"),
    nn.SELU: _functional("selu"),
    nn.SiLU: _functional("silu"),
    nn.Sigmoid: lambda layer: Form("torch.sigmoid"),
    nn.Softmax: _along_a_dim("softmax"),
    nn.Softmax2d: lambda layer: Form("torch.nn.functional.softmax", values={"dim": -3}),
    nn.Softmin: _along_a_dim("softmin"),
    nn.Softplus: _functional("softplus", "beta", "threshold"),
    nn.Softshrink: _functional("softshrink", "lambd"),
    nn.Softsign: _functional("softsign"),
    nn.Tanh: lambda layer: Form("torch.tanh"),
    nn.Tanhshrink: _functional("tanhshrink"),
    nn.Threshold: _functional("threshold", "threshold", "value"),
}
