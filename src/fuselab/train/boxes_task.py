"""Synthetic images of boxes, and a small detector that predicts one box per cell of a grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GRID, CELL = 16, 4  # cells along an image's side, pixels along a cell's
CELLS, PIXELS = GRID * GRID, GRID * CELL
LARGEST = 2.0  # side of a box, in cells
_FILLED = 0.6  # share of cells that have a box; the other rows of a target are padding


def images_and_boxes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw images and their boxes, float32 in the CPU's memory.

    ``images`` (count, 1, 64, 64): each pixel is the number of boxes that cover its centre.
    ``boxes`` (count, 256, 4) as (x1, y1, x2, y2) in cells: row r is the box whose centre lies in
    cell r, zeros if there is none.
    """
    place = torch.arange(CELLS)
    corner = torch.stack([place % GRID, place // GRID], -1).float()
    centre = corner + torch.rand(count, CELLS, 2, generator=generator)
    half = (0.5 + (LARGEST - 0.5) * torch.rand(count, CELLS, 2, generator=generator)) / 2
    boxes = torch.cat([centre - half, centre + half], -1)
    boxes *= torch.rand(count, CELLS, 1, generator=generator) < _FILLED
    pixel = (torch.arange(PIXELS) + 0.5) / CELL
    x1, y1, x2, y2 = boxes.unsqueeze(-1).unbind(-2)
    across = ((pixel >= x1) & (pixel < x2)).float()  # (count, 256, 64)
    down = ((pixel >= y1) & (pixel < y2)).float()
    return (down.transpose(1, 2) @ across).unsqueeze(1), boxes


class Detector(nn.Module):
    """A detector that maps images (B, 1, 64, 64) to boxes (B, 256, 4), in cells.

    With ``casts`` the last layer's outputs become float32 before they become coordinates. Without
    it the boxes have the dtype of autocast: bfloat16, whose steps are 1/16 cell from 8 on.
    """

    cell: Tensor

    def __init__(self, casts: bool, width: int = 32) -> None:
        super().__init__()
        self.casts = casts
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4, 1),
        )
        place = torch.arange(CELLS)
        self.register_buffer("cell", torch.stack([place % GRID, place // GRID], -1).float())

    def forward(self, images: Tensor) -> Tensor:
        raw = self.layers(images).flatten(2).transpose(1, 2)
        raw = raw.float() if self.casts else raw
        share = torch.sigmoid(raw)
        centre = self.cell.to(raw.dtype) + share[..., :2]
        half = LARGEST / 2 * share[..., 2:]
        return torch.cat([centre - half, centre + half], -1)
