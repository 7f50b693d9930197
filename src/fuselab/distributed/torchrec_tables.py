"""Embedding tables and sharding plans in TorchRec's form, and back.

TorchRec (github.com/meta-pytorch/torchrec) keeps tables in an ``EmbeddingBagCollection`` or an
``EmbeddingCollection`` and plans them with a ``ShardingPlan``. Both forms share their parameters
here: nothing is copied, and a change in one is a change in the other. Only a table that one feature
reads, one id per row, means the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.distributed.sharding import Placement, Shard, ShardingPlan
from fuselab.distributed.tables import ShardedTables
from fuselab.errors import ArgumentError, MissingDependencyError, ShapeError
from fuselab.nn.embedding_collection import FusedEmbeddingCollection

try:
    import torchrec
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding
except ImportError as error:
    raise MissingDependencyError.of_extra("TorchRec's tables need", "torchrec", "torchrec") from (
        error
    )

_MULTIPLE = 4  # fbgemm's kernels take rows of whole 16 bytes
_DTYPES = {torch.float32: "FP32", torch.float16: "FP16"}


def to_torchrec(
    collection: FusedEmbeddingCollection, names: Sequence[str], *, pooled: bool = True
) -> Any:
    """Return TorchRec's collection over the parameters of ``collection``.

    Args:
        collection: T tables.
        names: T names, of the tables and of the features that read them.
        pooled: whether to return an ``EmbeddingBagCollection``, otherwise an
            ``EmbeddingCollection``.

    Raises:
        ArgumentError: names are too few, too many or occur twice, or a table is neither float32 nor
            float16, the dtypes that TorchRec's unsharded modules have.
    """
    if len(names) != len(collection) or len({*names}) != len(names):
        raise ArgumentError(
            f"to_torchrec: {len(names)} names ({len({*names})} of them different) for "
            f"{len(collection)} tables; give each table one of its own."
        )
    for name, table in zip(names, collection, strict=True):
        if table.weight.dtype not in _DTYPES:
            raise ArgumentError(
                f"to_torchrec: table '{name}' is {table.weight.dtype}; TorchRec takes float32 and "
                "float16."
            )
    kind = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    configs = [
        kind(
            name=name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            data_type=torchrec.DataType[_DTYPES[table.weight.dtype]],
            feature_names=[name],
        )
        for name, table in zip(names, collection, strict=True)
    ]
    meta = torch.device("meta")
    made: Any = (
        torchrec.EmbeddingBagCollection(configs, device=meta)
        if pooled
        else torchrec.EmbeddingCollection(configs, device=meta)
    )
    for name, table in zip(names, collection, strict=True):
        _modules(made)[name].weight = table.weight
    made._device = collection[0].weight.device
    return made


def from_torchrec(collection: Any, **options: Any) -> FusedEmbeddingCollection:
    """Return fuselab's collection over the parameters of TorchRec's, in its order of tables.

    ``collection`` is an ``EmbeddingBagCollection`` or ``EmbeddingCollection`` that is not sharded,
    and ``options`` are the keywords of ``FusedEmbeddingCollection``. A bag of one id is a look-up,
    whatever its pooling.

    Raises:
        ArgumentError: it is something else, it weights its ids, or several features read a table.
        ShapeError: the tables' widths differ.
    """
    if type(collection) not in (torchrec.EmbeddingBagCollection, torchrec.EmbeddingCollection):
        raise ArgumentError(
            f"from_torchrec: the collection is {type(collection).__qualname__}; give an "
            "EmbeddingBagCollection or EmbeddingCollection of torchrec that is not sharded."
        )
    if getattr(collection, "is_weighted", lambda: False)():
        raise ArgumentError(
            "from_torchrec: the collection weights its ids, which a fused look-up does not; keep "
            "it as it is."
        )
    tables = []
    for config in _configs(collection):
        if len(config.feature_names) != 1:
            raise ArgumentError(
                f"from_torchrec: the features {', '.join(config.feature_names)} read table "
                f"'{config.name}'; give each feature a table of its own."
            )
        table = nn.Embedding(config.num_embeddings, config.embedding_dim, device="meta")
        table.weight = _modules(collection)[config.name].weight
        tables.append(table.train(collection.training))
    return FusedEmbeddingCollection.from_embeddings(tables, **options)


def features(ids: Tensor, names: Sequence[str]) -> Any:
    """Return ids [B, T] as a ``KeyedJaggedTensor`` with one id per row for each of T names."""
    if ids.dim() != 2 or ids.shape[1] != len(names):
        raise ShapeError(
            f"features: 'ids' has shape {tuple(ids.shape)} for {len(names)} names; expected "
            f"(B, {len(names)})."
        )
    values = ids.t().reshape(-1)
    lengths = torch.ones(len(values), dtype=torch.int32, device=ids.device)
    return torchrec.KeyedJaggedTensor(list(names), values, lengths=lengths, stride=len(ids))


def ids_of(features: Any, names: Sequence[str]) -> Tensor:
    """Return the ids [B, T] of a ``KeyedJaggedTensor`` for each of T names.

    Raises ArgumentError unless every row has one id for each name, which waits for a GPU.
    """
    columns = []
    for name in names:
        jagged = features[name]
        if bool((jagged.lengths() != 1).any()):
            raise ArgumentError(
                f"ids_of: a row has no id, or several, for '{name}'; tables of fuselab.nn look up "
                "one id per row."
            )
        columns.append(jagged.values())
    return torch.stack(columns, 1)


def _modules(collection: Any) -> Any:
    """Return the tables of TorchRec's collection by name."""
    bags = isinstance(collection, torchrec.EmbeddingBagCollection)
    return collection.embedding_bags if bags else collection.embeddings


def _configs(collection: Any) -> list[Any]:
    if isinstance(collection, torchrec.EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


# --- plans ---------------------------------------------------------------------------------------


def to_torchrec_plan(
    plan: ShardingPlan,
    names: Sequence[str],
    device_type: str,
    local_world_size: int | None = None,
    compute_kernel: str = "fused",
) -> Any:
    """Return TorchRec's plan of one module, an ``EmbeddingModuleShardingPlan``.

    Args:
        plan: placements of T tables.
        names: the T tables' names in TorchRec's module.
        device_type: ``"cuda"`` or ``"cpu"``.
        local_world_size: the ranks of one machine; default: all.
        compute_kernel: TorchRec's name of the look-up. Replicated tables always get ``"dense"``,
            the only one that TorchRec has for them.

    Raises:
        ArgumentError: TorchRec cannot place a table so. Its rows are cut into equal blocks (the
            last may be shorter) for ranks 0, 1, 2, ..., and its columns in multiples of 4.
    """
    local = local_world_size or plan.world_size
    if len(names) != len(plan.tables):
        raise ArgumentError(
            f"to_torchrec_plan: {len(names)} names for {len(plan.tables)} tables; give each one."
        )
    found = EmbeddingModuleShardingPlan()
    shards = plan.shards()
    for place, (name, placement) in enumerate(zip(names, plan.placements, strict=True)):
        _check_for_torchrec(name, plan.tables[place], placement, plan.world_size)
        if placement.kind == "replicated":
            everyone = list(range(plan.world_size))
            found[name] = ParameterSharding("data_parallel", "dense", everyone)
            continue
        blocks = [
            ShardMetadata(
                shard_offsets=[shard.first_row, shard.first_column],
                shard_sizes=[shard.rows, shard.columns],
                placement=_device(shard.rank, device_type, local),
            )
            for shard in shards
            if shard.table == place
        ]
        ranks = list(placement.ranks)
        if placement.kind == "row":  # a rank behind the last row has an empty block
            rows, columns = plan.tables[place]
            for rank in range(len(ranks), plan.world_size):
                where = _device(rank, device_type, local)
                blocks.append(ShardMetadata([rows, 0], [0, columns], where))
                ranks.append(rank)
        found[name] = ParameterSharding(
            f"{placement.kind}_wise", compute_kernel, ranks, EnumerableShardingSpec(blocks)
        )
    return found


def from_torchrec_plan(
    plan: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]], world_size: int
) -> ShardingPlan:
    """Return fuselab's plan for TorchRec's plan of one module.

    Args:
        plan: a ``ParameterSharding`` by table, as an ``EmbeddingModuleShardingPlan`` is.
        sizes: rows and columns by table, in the model's order.
        world_size: how many ranks.

    Raises:
        ArgumentError: a table is missing, or is cut in both directions (TorchRec's grid).
    """
    placements = []
    for name, (rows, columns) in sizes.items():
        if name not in plan:
            raise ArgumentError(
                f"from_torchrec_plan: the plan has no table '{name}'; it has {', '.join(plan)}."
            )
        sharding = plan[name]
        if sharding.sharding_type == "data_parallel":
            placements.append(Placement("replicated"))
            continue
        blocks = [
            (*shard.shard_offsets, *shard.shard_sizes, rank)
            for shard, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True)
            if min(shard.shard_sizes) > 0
        ]
        placements.append(_placement(name, rows, columns, sorted(blocks)))
    return ShardingPlan(world_size, tuple(sizes.values()), tuple(placements))


def _placement(
    name: str, rows: int, columns: int, blocks: Sequence[tuple[int, int, int, int, int]]
) -> Placement:
    ranks = tuple(rank for *_, rank in blocks)
    if len(blocks) == 1:
        return Placement("table", ranks)
    if all(width == columns for _, _, _, width, _ in blocks):
        return Placement("row", ranks, tuple(height for _, _, height, _, _ in blocks))
    if all(height == rows for _, _, height, _, _ in blocks):
        return Placement("column", ranks, tuple(width for _, _, _, width, _ in blocks))
    raise ArgumentError(
        f"from_torchrec_plan: table '{name}' is cut by rows and by columns; cut it one way."
    )


def _check_for_torchrec(
    name: str, size: tuple[int, int], placement: Placement, world_size: int
) -> None:
    if placement.kind == "row":
        block = -(-size[0] // world_size)
        wanted = [
            count for rank in range(world_size) if (count := min(block, size[0] - rank * block)) > 0
        ]
        if list(placement.sizes) != wanted or placement.ranks != tuple(range(len(wanted))):
            raise ArgumentError(
                f"to_torchrec_plan: TorchRec cuts the {size[0]} rows of table '{name}' into "
                f"{wanted} for ranks 0 to {len(wanted) - 1}, and the plan into "
                f"{list(placement.sizes)} for {list(placement.ranks)}; plan it so, or by columns."
            )
    widths = placement.sizes if placement.kind == "column" else (size[1],)
    if any(width % _MULTIPLE for width in widths):
        raise ArgumentError(
            f"to_torchrec_plan: table '{name}' has blocks of {list(widths)} columns; TorchRec "
            f"takes multiples of {_MULTIPLE}."
        )


def _device(rank: int, device_type: str, local: int) -> str:
    where = f"cuda:{rank % local}" if device_type == "cuda" else device_type
    return f"rank:{rank}/{where}"


# --- sharded modules -----------------------------------------------------------------------------


def read_blocks(tables: ShardedTables, module: nn.Module, names: Sequence[str]) -> None:
    """Copy this rank's blocks from a module that TorchRec sharded by the same plan.

    Nothing is sent. Raises ArgumentError if the module does not hold one of the blocks.
    """
    with torch.no_grad():
        for parameter, theirs in _pairs(tables, module, names):
            parameter.copy_(theirs)


def write_blocks(tables: ShardedTables, module: nn.Module, names: Sequence[str]) -> None:
    """Copy this rank's blocks into a module that TorchRec sharded by the same plan.

    Nothing is sent. Raises ArgumentError if the module does not hold one of the blocks.
    """
    with torch.no_grad():
        for parameter, theirs in _pairs(tables, module, names):
            theirs.copy_(parameter)


def _pairs(
    tables: ShardedTables, module: nn.Module, names: Sequence[str]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of this rank with the memory of the same block in TorchRec's module."""
    state = {key.split(".")[-2]: value for key, value in module.state_dict().items()}
    for what, parameter in tables.held():
        name = names[what.table if isinstance(what, Shard) else what]
        found = state.get(name)
        if isinstance(what, int):
            if not isinstance(found, Tensor) or found.shape != parameter.shape:
                raise ArgumentError(f"the module has no whole table '{name}' on this rank.")
            yield parameter, found
            continue
        wanted = [what.first_row, what.first_column], [what.rows, what.columns]
        local: list[Any] = getattr(found, "local_shards", list)()
        block = next(
            (
                shard.tensor
                for shard in local
                if (list(shard.metadata.shard_offsets), list(shard.metadata.shard_sizes)) == wanted
            ),
            None,
        )
        if block is None:
            raise ArgumentError(
                f"the module has no block of table '{name}' from row {what.first_row} and column "
                f"{what.first_column} on this rank; shard it by to_torchrec_plan of this plan."
            )
        yield parameter, block
