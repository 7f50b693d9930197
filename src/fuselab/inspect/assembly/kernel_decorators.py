"""Take a Triton kernel apart into its ``@triton.autotune``, its ``@triton.heuristics`` and its
function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuselab.errors import TargetError


@dataclass(frozen=True)
class Configuration:
    """One ``triton.Config``: constants and options by name, and its hook, which runs before each
    launch."""

    setting: Mapping[str, Any]
    hook: Callable[[dict[str, Any]], Any] | None = None


@dataclass(frozen=True)
class Decorated:
    """A kernel taken apart: the ``@triton.jit`` function, its ``@triton.autotune``, and the
    functions of its ``@triton.heuristics`` by the constant that each computes."""

    function: Any
    tuner: Any = None
    heuristics: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)

    @property
    def configurations(self) -> Sequence[Configuration]:
        """Those that autotune chooses among; none where it was given none."""
        found = self.tuner.configs if self.tuner is not None else []
        return [_of_config(one) for one in found if one.kwargs or len(found) > 1]

    @property
    def chosen(self) -> set[str]:
        """The constants that the decorators give, which a caller of the kernel leaves out."""
        configs = self.tuner.configs if self.tuner is not None else []
        return {*self.heuristics, *(name for one in configs for name in one.kwargs)}

    def completed(self, values: Mapping[str, Any], kept: Collection[str] = ()) -> dict[str, Any]:
        """Return ``values`` with what the heuristics compute from them, but for the names in
        ``kept``."""
        found = dict(values)
        for name, compute in self.heuristics.items():
            if name not in kept:
                found[name] = compute(dict(found))
        return found

    def pruned(self, values: Mapping[str, Any]) -> Sequence[Configuration]:
        """Return the configurations that autotune's own ``early_config_prune`` leaves for these
        arguments. Raises TargetError where that fails."""
        if self.tuner is None or self.tuner.early_config_prune is None:
            return self.configurations
        try:
            left = self.tuner.early_config_prune(self.tuner.configs, dict(values))
            return [_of_config(one) for one in left]
        except Exception as error:
            raise TargetError(
                f"early_config_prune of {self.function.__name__} raised "
                f"{type(error).__name__}: {str(error).rstrip('.')}."
            ) from error


def taken_apart(kernel: Any) -> Decorated:
    """Return what a kernel is decorated with. Raises TargetError for a decorator that is not
    Triton's."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.interpreter import InterpretedFunction

    tuner = None
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while not (hasattr(kernel, "arg_names") and hasattr(kernel, "params")):
        if isinstance(kernel, InterpretedFunction):
            break
        if isinstance(kernel, Autotuner):
            tuner = kernel
        elif isinstance(kernel, Heuristics):
            heuristics |= kernel.values
        else:
            raise TargetError(
                f"a kernel is decorated by {type(kernel).__name__}, which is not Triton's, so what "
                "that chooses is not known; name the kernel without it."
            )
        kernel = kernel.fn
    return Decorated(kernel, tuner, heuristics)


def _of_config(config: Any) -> Configuration:
    setting = dict(config.all_kwargs())
    if setting.get("num_ctas") == 1:  # the default, which says nothing
        del setting["num_ctas"]
    return Configuration(setting, config.pre_hook)
