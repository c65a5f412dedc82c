"""A 5 × 5 convolution after nearest-neighbor upsampling, as 3 × 3 convolutions at the lower resolution.

Several of the 25 weights read copies of the same pixel: summed beforehand, 9 remain for each of the 4 output phases,
and nothing is computed on copies (Shi et al. 2016, arXiv:1609.07009). The values are the same, up to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE = 5  # of the kernels


class UpsampledConv(nn.Conv2d):
    """Nearest-neighbor upsampling by 2, then 5 × 5 with padding 2: `[N, C, H, W]` to `[N, O, 2H, 2W]`."""

    taps: Tensor  # `[2, 3, 5]`: 1 where, in output pixels of phase a, weight u reads the pixel s - 1

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, SIDE, padding=SIDE // 2)
        self.register_buffer("taps", _taps(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        assert self.bias is not None
        with torch.autocast(x.device.type, enabled=False):  # the sums of weights in float32
            kernel = torch.einsum("oiuv,asu,btv->oabist", self.weight, self.taps, self.taps).flatten(0, 2)
        return functional.pixel_shuffle(functional.conv2d(x, kernel, self.bias.repeat_interleave(4), padding=1), 2)


def _taps() -> Tensor:
    """See `UpsampledConv.taps`."""
    taps = torch.zeros(2, 3, SIDE)
    for phase in (0, 1):
        for u in range(SIDE):
            taps[phase, (phase + u - SIDE // 2) // 2 + 1, u] = 1
    return taps
