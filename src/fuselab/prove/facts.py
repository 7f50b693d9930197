"""The facts of an operator that the judge knows, told by the process that imported it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from fuselab.op import FusedOp, Gradient


@dataclass(frozen=True)
class GradientFacts:
    """The names of the arguments that have no gradient, of an operator that has a ``Gradient``:
    those where one is refused, and those where it is None."""

    frozen: tuple[str, ...]
    non_differentiable: tuple[str, ...]

    @classmethod
    def of(cls, gradient: Gradient) -> GradientFacts:
        return cls(tuple(gradient.frozen), tuple(gradient.non_differentiable))


@dataclass(frozen=True)
class CaseFacts:
    """The name and the tags of a ``Case``."""

    name: str
    tags: frozenset[str]


@dataclass(frozen=True)
class Facts:
    """The plain values of a ``FusedOp``, under the names that it has there.

    ``implementations`` gives each one's kind of device. ``autocast`` and ``has_draw`` tell whether
    the operator declares these functions.
    """

    name: str
    parameters: tuple[str, ...]
    tensor_parameters: tuple[str, ...]
    float_parameters: tuple[str, ...]
    implementations: Mapping[str, str]
    dtypes: tuple[torch.dtype, ...]
    cases: tuple[CaseFacts, ...]
    gradient: GradientFacts | None
    mutates: tuple[str, ...]
    output_count: int
    residual_count: int
    nondeterministic: str | None
    autocast: bool
    has_draw: bool

    @property
    def namespace(self) -> str:
        return self.name.split("::")[0]

    @property
    def short_name(self) -> str:
        return self.name.split("::")[1]

    def plain(self) -> dict[str, Any]:
        """Return the facts as a message holds them."""
        cases = tuple((case.name, tuple(sorted(case.tags))) for case in self.cases)
        gradient = None if self.gradient is None else astuple(self.gradient)
        return asdict(self) | {"cases": cases, "gradient": gradient}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Facts:
        """Rebuild the facts that another process told."""
        gradient = plain["gradient"]
        return cls(
            **{
                **plain,
                "cases": tuple(CaseFacts(name, frozenset(tags)) for name, tags in plain["cases"]),
                "gradient": None if gradient is None else GradientFacts(*gradient),
            }
        )


Declared = FusedOp | Facts


def facts_of(op: FusedOp) -> Facts:
    """Return the facts of an operator that this process holds. Raises ContractError where its
    reference, or ``residuals``, is annotated wrongly."""
    return Facts(
        name=op.name,
        parameters=op.parameters,
        tensor_parameters=op.tensor_parameters,
        float_parameters=op.float_parameters,
        implementations={name: one.device for name, one in op.implementations.items()},
        dtypes=tuple(op.dtypes),
        cases=tuple(CaseFacts(case.name, frozenset(case.tags)) for case in op.cases),
        gradient=None if op.gradient is None else GradientFacts.of(op.gradient),
        mutates=tuple(op.mutates),
        output_count=op.output_count,
        residual_count=op.residual_count,
        nondeterministic=op.nondeterministic,
        autocast=op.autocast is not None,
        has_draw=op.draw is not None,
    )
