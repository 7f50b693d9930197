"""Group calls that can be one kernel, as long as no other call has to run between two of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from torch import fx

# Calls that move no data, or that only arrange it for a call that follows. One of them alone is no
# reason for a kernel, and at the edge of a region it stays outside.
ARRANGING = frozenset(
    (
        "chunk", "contiguous", "detach", "expand", "expand_as", "flatten", "getattr", "getitem",
        "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t",
        "tensor_split", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
    )
)  # fmt: skip
# The name of one of the several results of a call that computes, such as torch.max along a dim: it
# belongs to that call.
RESULT = "result"
# A region of one call is worth a kernel only if eager PyTorch computes the call in several passes.
SEVERAL_PASSES = frozenset(
    (
        "alpha_dropout", "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "dropout", "dropout1d",
        "dropout2d", "dropout3d", "feature_alpha_dropout", "glu", "group_norm",
        "hinge_embedding_loss", "huber_loss", "instance_norm", "kl_div", "l1_loss", "layer_norm",
        "local_response_norm", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss",
        "multilabel_soft_margin_loss", "nanmean", "normalize", "pairwise_distance",
        "poisson_nll_loss", "rms_norm", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin",
        "std", "std_mean", "triplet_margin_loss", "var", "var_mean",
    )
)  # fmt: skip


def groups_worth_a_kernel(
    calls: Sequence[fx.Node],
    before: Mapping[fx.Node, set[fx.Node]],
    refused: Container[fx.Node],
    name_of: Callable[[fx.Node], str],
    apart: Container[fx.Node] = (),
) -> list[list[fx.Node]]:
    """Return the largest groups of calls that are not ``refused``, each in the order of the calls.
    Those in ``apart`` begin a group: they do not join what they read.

    ``calls`` are in an order in which they can run, ``before`` has those that each call needs, and
    ``name_of`` returns a call's plain name, such as ``relu``. Arrangements at the edges of a group,
    which cost nothing outside, are left out, and so are groups that would gain nothing.
    """
    largest = _largest(calls, before, refused, apart)
    groups = [_trimmed(group, calls, before, name_of) for group in largest]
    return [group for group in groups if is_worth_a_kernel(group, name_of)]


def is_worth_a_kernel(group: Sequence[fx.Node], name_of: Callable[[fx.Node], str]) -> bool:
    """Return whether eager PyTorch would compute the group in several passes over memory."""
    computing = [name_of(node) for node in group if name_of(node) not in {RESULT, *ARRANGING}]
    return len(computing) > 1 or any(name in SEVERAL_PASSES for name in computing)


def first_that_does_not_join(
    group: Sequence[fx.Node], is_possible: Callable[[Sequence[fx.Node]], bool]
) -> fx.Node | None:
    """Return the first call of a group that is not ``is_possible`` as one kernel with those before
    it; None where the first call alone is not. What holds for some calls is taken to hold for
    fewer."""
    least, most = 0, len(group)  # the first `least` calls are possible, the first `most` are not
    while most - least > 1:
        middle = (least + most) // 2
        if is_possible(group[:middle]):
            least = middle
        else:
            most = middle
    return group[least] if least else None


def _largest(
    calls: Sequence[fx.Node],
    before: Mapping[fx.Node, set[fx.Node]],
    refused: Container[fx.Node],
    apart: Container[fx.Node],
) -> list[list[fx.Node]]:
    place_of = {node: place for place, node in enumerate(calls)}
    group_of: dict[fx.Node, int] = {}
    members: dict[int, list[fx.Node]] = {}
    for place, node in enumerate(calls):
        if node in refused:
            continue
        group_of[node] = place
        members[place] = [node]
        if node in apart:
            continue
        for source in sorted(before[node], key=place_of.__getitem__):
            other = group_of.get(source)
            if other is None or other == group_of[node]:
                continue
            joined = members[other] + members[group_of[node]]
            if not _encloses(set(joined), calls, before, group_of, members):
                for one in members.pop(group_of[node]):
                    group_of[one] = other
                members[other] = joined
    return list(members.values())


def _encloses(
    group: set[fx.Node],
    calls: Sequence[fx.Node],
    before: Mapping[fx.Node, set[fx.Node]],
    group_of: Mapping[fx.Node, int],
    members: Mapping[int, Sequence[fx.Node]],
) -> bool:
    """Return whether a call outside has to run after one of the group and before another."""
    after: set[fx.Node] = set()
    for node in calls:  # in order, each after what it depends on
        unit = {node, *members.get(group_of.get(node, -1), ())} - group
        sources = set().union(*(before[one] for one in {node, *unit}))
        if sources & after or (node not in group and sources & group):
            if node in group:
                if before[node] & after:
                    return True
            else:
                after |= unit
    return False


def _trimmed(
    group: Sequence[fx.Node],
    calls: Sequence[fx.Node],
    before: Mapping[fx.Node, set[fx.Node]],
    name_of: Callable[[fx.Node], str],
) -> list[fx.Node]:
    """Return the group without the arrangements at its edges. One that reads a size of a call of
    the group, as a slice may, is not at its edge."""
    kept = list(group)
    while True:
        held = set(kept)
        inner = [
            node
            for node in kept
            if name_of(node) not in ARRANGING
            or (held.intersection(before[node]) and any(node in before[one] for one in held))
        ]
        if len(inner) == len(kept):
            return sorted(kept, key=calls.index)
        kept = inner
