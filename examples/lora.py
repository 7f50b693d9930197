"""LoRA: a frozen layer and a small one that trains, in one operator.

Low-rank adapters (Hu et al., arXiv:2106.09685): what they save, what they cost, how they merge, and
what fusing them gains.

    python examples/lora.py
    fuselab train lora
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fuselab
from fuselab.errors import FuselabError
from fuselab.nn import LoRALinear
from fuselab.nn.lora_linear import adapters_from_difference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.3  # per timing

# ## What trains
#
# A layer's weight W (N, K) stays as it is. Only an update of rank r is learnt, B A with A (r, K)
# and B (N, r): `y = x Wᵀ + b + alpha / r (x Aᵀ) Bᵀ`. Only A and B need gradients and an optimizer's
# state; gradient and Adam's state are three more numbers per parameter.


def what_trains() -> None:
    size = 4096
    print(" rank  parameters     share  gradients and Adam, float32")
    for rank in (4, 16, 64):
        adapter = rank * (size + size)
        print(f"{rank:5} {adapter:11,} {adapter / size**2:9.2%} {12 * adapter / 1e6:10.1f} MB")
    print(f" full {size**2:11,} {1:9.2%} {12 * size**2 / 1e6:10.1f} MB")


# ## A layer, wrapped
#
# B begins at zero, so a fresh adapter changes nothing. The base's parameters are shared, not
# copied, and frozen; asking for their gradient raises an error instead of returning zero.


def a_wrapped_layer() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48)
    x = torch.randn(10, 64)
    expected = torch.relu(linear(x)).detach()
    layer = LoRALinear(linear, rank=4, alpha=8.0, activation="relu")
    print("fresh adapter changes nothing:", torch.allclose(layer(x), expected, atol=1e-6))
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        print(f"{name:7} {tuple(parameter.shape)!s:9} gradient: {parameter.grad is not None}")
    linear.weight.requires_grad_(True)
    try:
        layer(x)
    except FuselabError as error:
        print(f"{type(error).__name__}: {error}")


# ## Training and merging
#
# The task is to turn one layer into another, where the difference of their weights has rank 2. An
# adapter of rank 2 learns it. Merged into the weight it costs nothing at inference, and unmerging
# restores every bit.


def train_and_merge() -> None:
    torch.manual_seed(0)
    base = nn.Linear(32, 32)
    difference = torch.randn(32, 2) @ torch.randn(2, 32) / 8
    x = torch.randn(256, 32)
    target = F.linear(x, base.weight.detach() + difference, base.bias.detach())
    layer = LoRALinear(copy.deepcopy(base), rank=2, alpha=2.0)
    optimizer = torch.optim.Adam([layer.lora_a, layer.lora_b], lr=0.02)
    for step in range(101):
        loss = F.mse_loss(layer(x), target)
        if step % 25 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    layer.eval()
    apart = layer(x)
    layer.merge()
    print("merged, largest difference below 1e-5:", bool((layer(x) - apart).abs().max() < 1e-5))
    layer.unmerge()
    print("unmerged, the base bit for bit:", torch.equal(layer.weight, base.weight))


# ## Which rank?
#
# For two given weights, the best update of each rank is known without training: it is the truncated
# singular value decomposition of their difference, which also tells how much is lost.


def which_rank() -> None:
    torch.manual_seed(0)
    difference = torch.randn(64, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(64, 64)
    fit = adapters_from_difference(difference, rank=8)
    for rank in (0, 1, 4, 8, 16):
        print(f"rank {rank:2}: {fit.error_per_rank[rank].item():6.1%} of the difference is lost")


# ## What it costs
#
# An adapter adds few operations, and many bytes: eager PyTorch writes the update, an (M, N) matrix,
# reads it to scale it, and reads both to add them. Fused, the update is added where the product is
# accumulated. These are times on the machine that printed this page. On a CPU no kernel of ours is
# faster than PyTorch's products, so `auto` takes those:


def time_a_layer() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(512, 512), rank=8, alpha=16.0, activation="relu").to(DEVICE)
    x = torch.randn(2048, 512, device=DEVICE)
    merged = copy.deepcopy(layer).eval()
    merged.merge()
    ways = {
        "without an adapter": lambda: torch.relu(F.linear(x, layer.weight, layer.bias)),
        "adapter, eager": lambda: torch.relu(
            F.linear(x, layer.weight, layer.bias)
            + layer.scale * F.linear(F.linear(x, layer.lora_a), layer.lora_b)
        ),
        "LoRALinear": lambda: layer(x),
        "LoRALinear, merged": lambda: merged(x),
    }
    with torch.no_grad():
        for name, call in ways.items():
            timing = fuselab.time(call, device=DEVICE, budget_s=BUDGET_S)
            print(f"{name:20} {timing.median_us:9.1f} us")


# ## On an H200
#
# In bfloat16, M x K -> N and the rank; in brackets the ratio to the layer without an adapter, which
# is the floor. `triton` adds the update in the product's own accumulator; its backward reads the
# upstream gradient once for the gradients of B and of x Aᵀ.
#
# [file: lora_floor.txt]
#
# And a whole small training, `fuselab train lora`:
#
# [modes: train_lora.json]
#
# [bars: modes train_lora.json]

STEPS = (what_trains, a_wrapped_layer, train_and_merge, which_rank, time_a_layer)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
