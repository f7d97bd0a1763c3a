"""A ViT that resamples its positions once per grid of patches."""

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.inference.modules import Replacement
from multimodal.models.vit import ViT

GRIDS = 256  # resampled position tables kept


class PreparedViT(Replacement, ViT):
    def __init__(self, vit: ViT):
        super().__init__(vit)
        self.resampled: dict[tuple[int, int], Tensor] = {}

    def grid_positions(self, grid: tuple[int, int]) -> Float[Tensor, "N D"]:
        if grid == self.config.grid or self.positions is None or torch.compiler.is_compiling():
            return super().grid_positions(grid)
        if grid not in self.resampled:
            if len(self.resampled) >= GRIDS:
                self.resampled.clear()
            with torch.inference_mode(False), torch.no_grad():  # usable outside of inference mode
                self.resampled[grid] = super().grid_positions(grid)
        return self.resampled[grid]
