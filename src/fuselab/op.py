"""The contract: what a fused operator declares, and everything that the verbs know about it.

``docs/contract.md`` explains this file in prose. This file imports only torch and
``fuselab.errors``.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from fuselab.errors import ContractError, DtypeError

Element = TypeVar("Element")

_COLLECTIONS = (tuple, list, dict, Sequence, Mapping)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def tensors_in(values: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the tensors among ``values``, including those inside its lists and tuples, in
    order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return tuple(found)


def refuse_mixed_dtypes(*args: Any) -> None:
    """Raise DtypeError where the floating tensors among ``args`` have several dtypes.

    ``FusedOp.validate`` of an operator whose kernels read all of them in one dtype.
    """
    dtypes = {tensor.dtype: None for tensor in tensors_in(args) if tensor.is_floating_point()}
    if len(dtypes) > 1:
        names = ", ".join(map(dtype_name, dtypes))
        raise DtypeError(f"the floating tensors must have one dtype; they have {names}.")


def on_meta(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``args`` with meta tensors of the same sizes, strides and dtypes."""
    return tuple(map(_on_meta, args))


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return tuple(map(_on_meta, value)) if tensors_in((value,)) else value


def bytes_behind(*tensors: Tensor | None) -> int:
    """Return the least bytes that reading the tensors takes: an expanded dimension counts once,
    None counts nothing."""
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            continue
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride != 0 else 1
        total += elements * tensor.element_size()
    return total


@dataclass(frozen=True)
class Cost:
    """The least work that one call must do, whichever implementation runs it.

    ``bytes_read`` and ``bytes_written`` count every input byte and every output byte once;
    ``flops`` counts arithmetic operations, and ``unit`` names the arithmetic ceiling they run
    against (``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp64``).
    """

    bytes_read: int
    bytes_written: int
    flops: int
    unit: str = "fp32"

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    @classmethod
    def of(cls, read: Sequence[Tensor], written: Sequence[Tensor]) -> Cost:
        """Return the cost of reading and writing these tensors once, with one operation for each
        element written: a lower bound for any operator that memory limits."""
        numel = sum(tensor.numel() for tensor in written)
        size = sum(tensor.numel() * tensor.element_size() for tensor in written)
        is_double = any(tensor.dtype == torch.float64 for tensor in written)
        return cls(bytes_behind(*read), size, numel, "fp64" if is_double else "fp32")


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of an operator's public function."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One set of inputs that is worth checking or timing.

    ``make(device, dtype, generator)`` returns fresh ``Inputs``; equal generators give equal inputs
    (``generator`` is a CPU ``torch.Generator``). The verbs know these tags: ``bench`` (timed by
    default), ``boundary`` (checked by default), ``huge`` (needs more memory than a laptop has),
    ``sweep`` (one point of a size sweep, in order), ``tiny`` (host latency decides, not device
    time).
    """

    name: str
    make: Callable[[torch.device, torch.dtype, torch.Generator], Inputs]
    tags: frozenset[str] = frozenset()

    @classmethod
    def normal(cls, shapes: Sequence[Sequence[int]], *tags: str) -> Case:
        """Return a case whose arguments are tensors of normal values in the case's dtype, one for
        each of ``shapes``. Its name is the shapes: ``1024x64_and_64``."""

        def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
            drawn = (torch.randn(tuple(shape), generator=generator) for shape in shapes)
            return Inputs(tuple(tensor.to(device, dtype) for tensor in drawn))

        return cls(sized(*shapes), make, frozenset(tags))


def sized(*shapes: Sequence[int]) -> str:
    """Return a case's name by its operands' shapes: ``33x31``, or ``0d`` without dimensions."""
    return "_and_".join("x".join(map(str, shape)) or "0d" for shape in shapes)


class Draw(Protocol):
    """The source from which ``FusedOp.draw`` draws random inputs.

    The draws can be replayed, and a failing case is shrunk towards the simplest one that still
    fails.
    """

    device: torch.device
    dtype: torch.dtype

    def size(self, *interesting: int) -> int:
        """Draw a dimension: 0 to 3, powers of two and their neighbours, or one of
        ``interesting``."""

    def shape(self, *interesting: int) -> tuple[int, ...]:
        """Draw a shape of one to three dimensions, the last of them by ``size(*interesting)``."""

    def choice(self, options: Sequence[Element]) -> Element:
        """Draw one of ``options``; the first is the simplest."""

    def uniform(self, low: float, high: float) -> float:
        """Draw a float in [low, high]."""

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw a floating tensor of ``shape`` with random values and a random layout (strides,
        offset, stride-0 dimensions)."""

    def integers(
        self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Draw an integer tensor of ``shape`` with values in [low, high) and a random layout."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operator, such as its Triton kernels.

    ``forward(*args)`` takes every argument of the reference, in its order and with defaults filled
    in, allocates its outputs, launches on the current stream and returns what the reference
    returns, a tuple where that is several tensors. The ``forward`` of an operator that mutates
    arguments writes their new values over them and returns nothing. ``backward(needs, grad_output,
    *saved)`` returns one gradient or None for every tensor argument of the forward, and one for
    each tensor of a sequence; it returns None where ``needs`` is False. ``supports(*args)`` returns
    None if the implementation can run these arguments, and otherwise the reason why not, in a few
    words; ``supports_backward(needs, grad_output, *saved)`` does the same for the backward. For an
    operator with several outputs ``grad_output`` is a tuple of one tensor per output. ``device`` is
    the kind of device on which it runs.
    """

    device: Literal["cuda", "cpu"]
    forward: Callable[..., Any]
    backward: Callable[..., tuple[Tensor | None, ...]] | None = None
    supports: Callable[..., str | None] = lambda *args: None
    supports_backward: Callable[..., str | None] = lambda needs, grad_output, *saved: None


@dataclass(frozen=True)
class Gradient:
    """How an operator differentiates.

    ``save(output, *args)`` returns the tuple that the backward needs: arguments, the output, plain
    values. ``output`` is a tuple if there are several outputs, or ``FusedOp.residuals``, which
    stand behind the outputs. For an operator with several outputs ``grad_output`` is annotated
    ``Sequence[Tensor]`` and is a tuple of one tensor per output: zeros where an output received no
    gradient, or is not floating point. ``reference(needs, grad_output, *saved)``
    computes the gradient in plain differentiable PyTorch; its annotations give the raw operator its
    schema. It returns one gradient or None for every tensor argument, and its own derivative is the
    operator's second derivative. ``fake(needs, grad_output, *saved)`` returns empty tensors with
    the strides the implementations produce; without it, ``reference`` runs on fake tensors.
    ``prefer(needs, grad_output, *saved)`` returns the order in which ``implementation="auto"`` asks
    the implementations. ``frozen`` maps each argument whose gradient is refused to the end of a
    sentence that says what to do instead. ``non_differentiable`` names the arguments on which no
    output depends such that it has a gradient, as where a function reads the size alone: their
    gradient is None, and ``needs`` is False for them. ``passed`` has pairs of a place among the
    tensor arguments and one among the outputs, as ``((0, 0),)``: where argument 0 and output 0 have
    one dtype, device and shape, the gradient of the one is the upstream gradient of the other. The
    public function then returns that itself and asks the implementations only for the other
    gradients, as PyTorch's own sum does. ``equal`` has pairs of places among the tensor arguments,
    as ``((1, 0),)``: where arguments 1 and 0 have one dtype, device, shape and strides, the
    gradient of 1 is that of 0. The public function then asks for that of 0 alone and returns it for
    both, as PyTorch's own sum of two tensors does.
    """

    save: Callable[..., tuple[Any, ...]]
    reference: Callable[..., tuple[Tensor | None, ...]]
    fake: Callable[..., tuple[Tensor | None, ...]] | None = None
    prefer: Callable[..., Sequence[str]] | None = None
    frozen: Mapping[str, str] = field(default_factory=dict)
    non_differentiable: Sequence[str] = ()
    passed: Sequence[tuple[int, int]] = ()
    equal: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Rewrite:
    """A plain PyTorch expression that ``fuselab.fuse`` replaces by one call of the operator.

    ``pattern`` is a function of tensors (and values) that ``torch.fx`` can trace. ``call`` takes
    the same parameters and returns ``Inputs`` with which the public function computes the same
    result, whatever the tensors are in a later call; it may leave out parameters that only the
    pattern reads (a device). The parameters named in ``lists`` are lists of equal length; the
    length is found in the model. ``result`` takes the operator's output and, by name, parameters of
    ``call``; where the pattern returns more than the output, ``result`` returns what the pattern
    returns.
    """

    pattern: Callable[..., Tensor]
    call: Callable[..., Inputs]
    lists: Sequence[str] = ()
    result: Callable[..., Tensor] | None = None


def _contiguous(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.contiguous()
    return tuple(map(_contiguous, value)) if tensors_in((value,)) else value


def _is_method(function: Callable[..., Any], method: Callable[..., Any]) -> bool:
    """Return whether ``function`` is ``method`` of any instance."""
    return getattr(function, "__func__", None) is method


def _described(value: Any) -> str:
    """Return the kind of a value in a few words, for an error."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(map(_described, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def _undeclared_cost(*args: Any) -> Cost:
    """Stand for ``FusedOp.cost`` where it is not given; ``FusedOp`` puts its own in its place."""
    raise NotImplementedError


@dataclass(frozen=True)
class FusedOp:
    """A fused operator: the single declaration that every verb works from.

    ``name`` is ``namespace::operator``. ``reference`` defines the right result, in plain PyTorch
    that autograd understands. Its parameters must be annotated, because the annotations become the
    raw operator's schema (Tensor, Tensor | None, Sequence[Tensor], float, int, bool, str,
    torch.dtype | None; ``Sequence[Tensor]`` arrives as a tuple). It returns one tensor, or a flat
    tuple of several if its return annotation says so: ``tuple[Tensor, Tensor]``. Inside
    torch.compile a float arrives as a 0-d tensor, in the reference too. ``cost(*args)`` counts the
    least work of one forward. ``cost_backward(*args)`` takes the forward's arguments too and counts
    the least work of a backward that computes every gradient. If neither is given, the forward
    reads every tensor argument and writes the output once, the backward reads the upstream gradient
    and what is saved and writes the gradients once, each with one operation per element written.
    ``space(draw)`` draws the calls of a survey (``fuselab bench --survey``) where they are to be
    other ones than those of ``draw``, such as the ranks and tables that occur; its sizes grow from
    1 with the bytes that a call is to move.
    Where ``contiguous`` is True the implementations receive contiguous tensors only, copied where
    they are not, and the raw operator's results are contiguous, the reference's too.
    ``validate(*args)`` raises a typed error for arguments that the operator refuses.
    ``fake(*args)`` returns an empty output with the strides the implementations produce; without it
    the reference runs on fake tensors. ``prefer(*args)`` returns the order in which
    ``implementation="auto"`` asks ``supports``; without it, the order of ``implementations`` is
    used. ``autocast(autocast_dtype, *args)`` returns the arguments as ``torch.autocast`` would pass
    them to the reference (softmax: ``dtype=torch.float32``); without it they stay as they are,
    which is right for pointwise operators. ``peers`` maps provider names to other spellings in
    plain PyTorch worth timing beside the reference. ``libraries`` does the same for other
    libraries' kernels: each value is a function without parameters that imports the library and
    returns a function of the operator's arguments. ``dtypes`` are the dtypes worth checking.
    ``nondeterministic`` is None, or the reason why the order of a reduction is not fixed.
    ``configs[implementation](*args)`` lists the ``runtime.tuning.Config`` that tuning may choose
    from for these arguments, the default rule's first; ``configs[f"{implementation}_backward"]``
    takes the backward's arguments and lists those of the backward. ``regime(*args)`` names in a few
    words what, beside dtype and size, decides how fast an implementation is on a CPU (an
    activation, a class of widths). ``cpu_cases`` are timed to decide what ``implementation="auto"``
    takes on a CPU: those tagged ``dtypes`` in every dtype, the others in the first one; those
    tagged ``row`` make the published table.

    ``residuals(*args)`` defines, in plain PyTorch, what the forward keeps for the backward beside
    arguments and outputs, such as the mean of each row. It is annotated to return a flat tuple,
    ``tuple[Tensor]`` for one. An implementation's ``forward`` then returns its outputs and, behind
    them, the residuals, which ``Gradient.save`` gets and users do not. A second derivative does not
    flow through a residual, so that ``Gradient.reference`` has to compute it from the arguments.

    ``drawing`` takes the reference's arguments and draws random numbers from PyTorch's generator,
    where the reference makes them from a seed among the arguments, as a dropout does. ``bench``
    times it as eager and compiles it in the reference's place, because a mask from a seed takes
    PyTorch dozens of calls; its results cannot be compared.

    ``supports(*args)`` stands for that of every implementation, where ``torch.compile`` can trace
    it: it returns None, or why the kernels cannot take the arguments. Compiled code then computes
    the reference for such arguments, of which autograd has the gradient, as the public function
    does elsewhere; without it, compiled code always calls the raw operator.

    An operator with ``mutates`` overwrites those arguments and returns the first of them; its name
    ends in an underscore, as PyTorch's do. Its reference writes to nothing: it returns the new
    values of those arguments, as one tensor or a flat tuple. Such an operator has no gradient.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Implementation]
    cost: Callable[..., Cost] = field(default=_undeclared_cost)
    cases: Sequence[Case] = ()
    gradient: Gradient | None = None
    cost_backward: Callable[..., Cost] | None = None
    draw: Callable[[Draw], Inputs] | None = None
    space: Callable[[Draw], Inputs] | None = None
    validate: Callable[..., None] = lambda *args: None
    fake: Callable[..., Any] | None = None
    prefer: Callable[..., Sequence[str]] | None = None
    rewrites: Sequence[Rewrite] = ()
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    libraries: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    autocast: Callable[..., Sequence[Any]] | None = None
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    nondeterministic: str | None = None
    configs: Mapping[str, Callable[..., Sequence[Mapping[str, int | str]]]] = field(
        default_factory=dict
    )
    mutates: Sequence[str] = ()
    contiguous: bool = False
    regime: Callable[..., str] | None = None
    cpu_cases: Sequence[Case] = ()
    residuals: Callable[..., tuple[Tensor, ...]] | None = None
    drawing: Callable[..., Any] | None = None
    supports: Callable[..., str | None] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z_][a-z0-9_]*::[a-z_][a-z0-9_]*", self.name):
            raise ContractError(
                f"FusedOp.name is '{self.name}'; it must read namespace::operator in lower case, "
                "for example 'mine::swiglu'."
            )
        for word in filter(keyword.iskeyword, self.name.split("::")):
            raise ContractError(
                f"FusedOp.name is '{self.name}', and '{word}' is a keyword of Python, so that the "
                "code which torch.compile generates for it would not parse; take another name."
            )
        if not self.cases:
            raise ContractError(f"{self.name}: FusedOp.cases is empty; give at least one Case.")
        for key in self.configs:
            if key.removesuffix("_backward") not in self.implementations:
                raise ContractError(
                    f"{self.name}: FusedOp.configs has '{key}'; its keys are those of "
                    "FusedOp.implementations, with '_backward' behind them for the backward."
                )
        if bool(self.mutates) != self.name.endswith("_"):
            raise ContractError(
                f"{self.name}: the name of an operator ends in '_' if and only if FusedOp.mutates "
                "names the arguments that it writes over."
            )
        if self.mutates and self.contiguous:
            raise ContractError(
                f"{self.name}: FusedOp.contiguous hands copies to the implementations, which could "
                "not write over the arguments in FusedOp.mutates; leave one of the two out."
            )
        if self.mutates and self.gradient is not None:
            raise ContractError(
                f"{self.name}: an operator that writes over its arguments has no gradient; give "
                "FusedOp.gradient to the one that returns a new tensor."
            )
        known = () if self.gradient is None else self.gradient.non_differentiable
        for name in known:
            if name not in self.tensor_parameters:
                raise ContractError(
                    f"{self.name}: Gradient.non_differentiable has '{name}', which is no tensor "
                    f"argument; they are {', '.join(self.tensor_parameters)}."
                )
        if self.residuals is not None and self.gradient is None:
            raise ContractError(
                f"{self.name}: FusedOp.residuals are for a backward, and FusedOp.gradient is None; "
                "leave them out."
            )
        # Defaults that `dataclasses.replace` copied from another operator give way to its own.
        backward = self.cost_backward
        if self.cost is _undeclared_cost or _is_method(self.cost, FusedOp._least_cost):
            object.__setattr__(self, "cost", self._least_cost)
            backward = backward or self._least_cost_backward
        if backward is not None and _is_method(backward, FusedOp._least_cost_backward):
            default = None if self.gradient is None else self._least_cost_backward
            object.__setattr__(self, "cost_backward", default)

    @property
    def namespace(self) -> str:
        return self.name.split("::")[0]

    @property
    def short_name(self) -> str:
        return self.name.split("::")[1]

    @cached_property
    def signature(self) -> inspect.Signature:
        """The reference's signature, with annotations resolved."""
        return inspect.signature(self.reference, eval_str=True)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(self.signature.parameters)

    @cached_property
    def tensor_parameters(self) -> tuple[str, ...]:
        """Names of the parameters annotated Tensor, Tensor | None or Sequence[Tensor], in order."""
        return tuple(
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation in (Tensor, Tensor | None, Sequence[Tensor])
        )

    @cached_property
    def float_parameters(self) -> tuple[str, ...]:
        """Names of the parameters annotated float; one compiled graph serves all their values."""
        return tuple(
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation is float
        )

    @cached_property
    def output_count(self) -> int:
        """The number of tensors that a call returns: the length of the tuple that the reference's
        return annotation names, else 1. Raises ContractError."""
        returned = self.signature.return_annotation
        origin = get_origin(returned) or returned
        if self.mutates or not (isinstance(origin, type) and issubclass(origin, _COLLECTIONS)):
            return 1
        kinds = get_args(returned)
        if origin is not tuple or len(kinds) < 2 or any(kind is not Tensor for kind in kinds):
            raise ContractError(
                f"{self.name}: the reference is annotated to return {returned!r}; an operator "
                "returns one Tensor or a flat tuple of at least two, such as tuple[Tensor, Tensor]."
            )
        return len(kinds)

    @cached_property
    def residual_count(self) -> int:
        """The number of tensors that ``residuals`` returns. Raises ContractError."""
        if self.residuals is None:
            return 0
        returned = inspect.signature(self.residuals, eval_str=True).return_annotation
        kinds = get_args(returned)
        if get_origin(returned) is not tuple or any(kind is not Tensor for kind in kinds):
            raise ContractError(
                f"{self.name}: FusedOp.residuals is annotated to return {returned!r}; it returns a "
                "flat tuple of tensors, such as tuple[Tensor, Tensor]."
            )
        return len(kinds)

    def outputs_of(self, returned: Any) -> tuple[Tensor, ...]:
        """Return the tensors that a reference ``returned``. Raises ContractError if it is something
        else than the reference's return annotation says."""
        return self._counted(returned, self.output_count)

    def returned_by_forward(self, returned: Any) -> tuple[Tensor, ...]:
        """Return the tensors that a forward ``returned``: outputs, and residuals behind them.
        Raises ContractError if it is something else than the reference's return annotation, and
        that of ``residuals``, say."""
        return self._counted(returned, self.output_count + self.residual_count)

    def _counted(self, returned: Any, count: int) -> tuple[Tensor, ...]:
        outputs = returned if count > 1 else (returned,)
        if (
            isinstance(outputs, (tuple, list))
            and len(outputs) == count
            and all(isinstance(output, Tensor) for output in outputs)
        ):
            return tuple(outputs)
        expected = "one tensor" if count == 1 else f"{count} tensors"
        behind = f" with {self.residual_count} of them residuals" if self.residual_count else ""
        raise ContractError(
            f"{self.name}: a call must return {expected}{behind}, as the reference's return "
            f"annotation says, and returned {_described(returned)}."
        )

    def with_residuals(self, output: Any, args: Sequence[Any]) -> Any:
        """Return what a forward returns where the reference returned ``output``: with the residuals
        of ``args`` behind it."""
        if self.residuals is None:
            return output
        return (*self.outputs_of(output), *self.residuals(*args))

    def without_residuals(self, returned: Any) -> Any:
        """Return what users get of what a forward, or the reference, ``returned``."""
        if self.residuals is None or not isinstance(returned, (tuple, list)):
            return returned
        return returned[0] if self.output_count == 1 else tuple(returned[: self.output_count])

    def arranged(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return ``values``, with every tensor contiguous where the operator is ``contiguous``."""
        return tuple(map(_contiguous, values)) if self.contiguous else tuple(values)

    def _least_cost(self, *args: Any) -> Cost:
        output = self._outputs_on_meta(on_meta(args), "cost")
        return Cost.of(tensors_in(args), tensors_in((output,)))

    def _least_cost_backward(self, *args: Any) -> Cost:
        assert self.gradient is not None
        like = on_meta(args)
        output = self._outputs_on_meta(like, "cost_backward")
        saved = tensors_in(self.gradient.save(self.with_residuals(output, like), *like))
        gradients = [tensor for tensor in tensors_in(args) if tensor.is_floating_point()]
        upstream = [tensor for tensor in tensors_in((output,)) if tensor.is_floating_point()]
        return Cost.of((*upstream, *saved), gradients)

    def _outputs_on_meta(self, like: Sequence[Any], cost: str) -> Any:
        """Return what the operator returns for meta tensors: shapes and dtypes without values."""
        try:
            return (self.fake or self.reference)(*like)
        except Exception as error:
            raise ContractError(
                f"{self.name}: give FusedOp.{cost}; the default runs the reference on meta "
                f"tensors, which raised {type(error).__name__}: {error}"
            ) from error

    def mutated(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the tensors among the bound arguments that a call overwrites, including those
        inside sequences."""
        named = zip(self.signature.parameters, args, strict=True)
        return tensors_in(value for name, value in named if name in self.mutates)

    def bind(self, inputs: Inputs) -> tuple[Any, ...]:
        """Return all arguments of a call in the reference's order, with defaults filled in and
        lists converted to tuples."""
        bound = self.signature.bind(*inputs.args, **inputs.kwargs)
        bound.apply_defaults()
        return tuple(tuple(arg) if isinstance(arg, list) else arg for arg in bound.args)
