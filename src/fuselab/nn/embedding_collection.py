"""Many embedding tables looked up in one launch, optionally with the optimizer in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentError, ShapeError, UnknownNameError
from fuselab.nn.plain_module import more_than
from fuselab.ops import embedding_lookup
from fuselab.ops.embedding_lookup import updating_embedding_lookup
from fuselab.ops.embedding_lookup.updating import OPTIMIZERS
from fuselab.ops.embedding_lookup.validation import HASHES, OUT_OF_RANGE, compute_dtype


class _Table(nn.Embedding):
    """An embedding table, with row-wise Adagrad's state as the buffer ``row_state``.

    A checkpoint without it, as ``nn.Embedding`` writes it, loads; the state then stays as it is.
    """

    row_state: Tensor

    def keep_state(self) -> None:
        """Register a state of zeros, one number per row."""
        zeros = torch.zeros(
            self.num_embeddings,
            dtype=compute_dtype(self.weight.dtype),
            device=self.weight.device,
        )
        self.register_buffer("row_state", zeros)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if "row_state" in self._buffers:
            state_dict.setdefault(f"{prefix}row_state", self.row_state)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Table:
        super()._apply(fn, recurse)
        # .half() converts the weights, but must not convert the sums
        if "row_state" in self._buffers:
            self.row_state = self.row_state.to(compute_dtype(self.weight.dtype))
        return self


class FusedEmbeddingCollection(nn.ModuleList):
    """Embeddings of T tables of one width, [B, T, D] from ids [B, T], in one launch.

    It is the ``nn.ModuleList`` of ``nn.Embedding`` that it replaces: the same modules, parameters
    and state_dict keys (``0.weight``, ``1.weight``, ...), whose tables may be indexed, frozen,
    moved and loaded one by one. Kernels get the tables' addresses with every call, so the tables
    need not be neighbours in memory.

    With an ``optimizer`` the backward takes its step on the rows that occurred (see
    ``updating_embedding_lookup`` for what that means): the parameters never get a ``.grad``, so an
    optimizer of the whole model does not change them. Row-wise Adagrad's state is a buffer of each
    table, ``0.row_state`` and so on, which is moved and saved with the table. ``learning_rate`` is
    an attribute for a schedule to set; make it a 0-d tensor if the step is captured in a CUDA
    graph.

    Args:
        num_embeddings: rows of each table.
        embedding_dim: D.
        out_of_range, hash: as for ``embedding_lookup``.
        optimizer: None, ``"sgd"`` or ``"rowwise_adagrad"``.
        learning_rate, eps: the optimizer's.
        device, dtype: of the tables.

    Raises:
        UnknownNameError: ``out_of_range``, ``hash`` or ``optimizer`` is not one of the known.
    """

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[_Table]: ...

    def __init__(
        self,
        num_embeddings: Sequence[int],
        embedding_dim: int,
        *,
        out_of_range: str = "error",
        hash: str | None = None,
        optimizer: str | None = None,
        learning_rate: float | Tensor = 0.01,
        eps: float = 1e-10,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for kind, name, known in (
            ("out_of_range", out_of_range, OUT_OF_RANGE),
            ("hash", hash, (*HASHES, None)),
            ("optimizer", optimizer, (*OPTIMIZERS, None)),
        ):
            if name not in known:
                raise UnknownNameError(kind, name, [str(one) for one in known])
        super().__init__(
            _Table(rows, embedding_dim, device=device, dtype=dtype) for rows in num_embeddings
        )
        self.embedding_dim = embedding_dim
        self.out_of_range, self.hash = out_of_range, hash
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        if optimizer == "rowwise_adagrad":
            for table in self:
                table.keep_state()

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward writes to the parameters; ``fuselab.fuse`` then works on a copy."""
        return self.optimizer is not None

    def __getitem__(self, index: Any) -> Any:
        """Return a table, or a collection of several for a slice."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        # nn.ModuleList would pass them to this class's __init__.
        part = FusedEmbeddingCollection(
            (),
            self.embedding_dim,
            out_of_range=self.out_of_range,
            hash=self.hash,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            eps=self.eps,
        )
        part.training = self.training
        return part.extend([*self][index])

    @classmethod
    def from_embeddings(
        cls, embeddings: Iterable[nn.Embedding], **options: Any
    ) -> FusedEmbeddingCollection:
        """Return a collection that shares the parameters of these modules.

        ``options`` are the keywords of the constructor.

        Raises:
            ArgumentError: there is none, or one is more than a look-up: not an nn.Embedding, or one
                with its own forward, hooks, a computed weight, or an option (padding_idx, max_norm,
                scale_grad_by_freq, sparse).
            ShapeError: their widths differ.
        """
        modules = list(embeddings)
        if not modules:
            raise ArgumentError("from_embeddings: there is no embedding; give at least one.")
        for place, module in enumerate(modules):
            problem = more_than(module, nn.Embedding)
            if problem is not None:
                raise ArgumentError(
                    f"from_embeddings: embedding {place} {problem}, which a fused look-up would "
                    "drop; keep it as it is."
                )
            if module.embedding_dim != modules[0].embedding_dim:
                raise ShapeError(
                    f"from_embeddings: embedding {place} is {module.embedding_dim} wide and "
                    f"embedding 0 {modules[0].embedding_dim}; expected one width."
                )
            for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
                value = getattr(module, option)
                if value is not None and value is not False:
                    raise ArgumentError(
                        f"from_embeddings: embedding {place} has {option}={value}, which a fused "
                        "look-up does not know; keep it as it is."
                    )
        sizes = [module.num_embeddings for module in modules]
        collection = cls(sizes, modules[0].embedding_dim, device="meta", **options)
        for table, module in zip(collection, modules, strict=True):
            table.weight = module.weight
            table.train(module.training)
            if "row_state" in table._buffers:
                table.keep_state()
        return collection

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [B, T], int64 or int32; return [B, T, D]."""
        tables = [table.weight for table in self]
        if self.optimizer is None:
            return embedding_lookup(tables, ids, self.out_of_range, self.hash)
        adagrad = self.optimizer == "rowwise_adagrad"
        states = [_state_of(place, table) for place, table in enumerate(self)] if adagrad else []
        vectors: Tensor = updating_embedding_lookup(
            tables,
            ids,
            self.optimizer,
            self.learning_rate,
            states,
            self.eps,
            self.out_of_range,
            self.hash,
        )
        return vectors

    def extra_repr(self) -> str:
        parts = [f"out_of_range={self.out_of_range!r}", f"hash={self.hash!r}"]
        if self.optimizer is not None:
            parts.append(f"optimizer={self.optimizer!r}, learning_rate={self.learning_rate}")
        return ", ".join(parts)


def _state_of(place: int, table: nn.Module) -> Tensor:
    state = table._buffers.get("row_state")
    if state is None:
        raise ArgumentError(
            f"FusedEmbeddingCollection: table {place} has no row-wise Adagrad state; put tables "
            "in by from_embeddings, which begins one."
        )
    return state
