"""The hook with which DistributedDataParallel adds gradients up instead of taking their mean."""

# DistributedDataParallel looks at the annotations themselves: no __future__ import makes them text.
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket


def add_up(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Begin the all-reduce of a bucket; the future is of the sums, in the bucket's own memory."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    found: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0])
    return found
