"""Convolutional subsampling of speech features, of whole recordings and of streams."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

PART = 6000  # frames, a minute


class Subsample(nn.Module):
    """Strided 3×3 convolutions over frames and bands, then a projection (Conformer paper, section 2).

    `factor` 2, 4 or 8 halves the frame rate one, two or three times. All convolutions but the first are
    depthwise-separable, as in FastConformer (Rekesh et al. 2023). Padded frames are zeroed before each."""

    def __init__(self, bands: int, width: int, factor: int, channels: int):
        super().__init__()
        halvings = {2: 1, 4: 2, 8: 3}[factor]
        self.first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels) for _ in range(halvings - 1)
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(halvings - 1))
        for _ in range(halvings):
            bands = (bands + 1) // 2
        self.project = nn.Linear(channels * bands, width)

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        if features.shape[1] > PART and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._in_parts(features, lengths)
        x = features[:, None]
        for stage in range(len(self.depthwise) + 1):
            x = self.halve(stage, F.pad(self._zeroed(x, lengths), (0, 0, 1, 1)))
            lengths = (lengths + 1) // 2
        return self.flat(x), lengths

    def _in_parts(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Row by row and part by part, since maps of the first convolution are 50 times as large as features."""
        made = []
        for row, length in zip(features, lengths.tolist(), strict=True):
            stream, parts = SubsampleStream(self), list(row[None, :length].split(PART, 1))
            made.append(torch.cat([stream.push(part, part is parts[-1])[0] for part in parts]))
        counts = torch.tensor([len(one) for one in made], device=lengths.device)
        padded = nn.utils.rnn.pad_sequence(made, batch_first=True)
        count = features.shape[1]
        for _ in range(len(self.depthwise) + 1):
            count = (count + 1) // 2
        return F.pad(padded, (0, 0, 0, count - padded.shape[1])), counts

    def halve(self, stage: int, x: Float[Tensor, "B C F M"]) -> Float[Tensor, "B D T K"]:
        """One convolution, T = ⌊(F - 1) / 2⌋; `x` includes the padding frames at both ends."""
        conv = self.depthwise[stage - 1] if stage else self.first
        x = F.conv2d(x, conv.weight, conv.bias, 2, (0, 1), groups=conv.groups)
        return F.relu(self.pointwise[stage - 1](x) if stage else x)

    def flat(self, x: Float[Tensor, "B C T M"]) -> Float[Tensor, "B T D"]:
        return self.project(x.transpose(1, 2).flatten(2))

    @staticmethod
    def _zeroed(x: Float[Tensor, "B C F M"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B C F M"]:
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        return torch.where(valid[:, None, :, None], x, 0)


class SubsampleStream:
    """`Subsample` for features in parts. Output t depends on frames factor·t ± (factor - 1), so each convolution waits
    for one later frame; `last` flushes the end of the stream."""

    def __init__(self, stem: Subsample):
        self.stem = stem
        self.pending: list[Tensor | None] = [None] * (len(stem.depthwise) + 1)

    def push(self, features: Float[Tensor, "B F M"], last: bool = False) -> Float[Tensor, "B T D"]:
        x = features[:, None]
        for stage, pending in enumerate(self.pending):
            edges = int(pending is None), int(last)  # padding at both ends of the whole stream
            x = F.pad(x if pending is None else torch.cat([pending, x], 2), (0, 0, *edges))
            count = max(x.shape[2] - 1, 0) // 2
            self.pending[stage] = x[:, :, 2 * count :]
            x = self.stem.halve(stage, x) if count else self._none(stage, x)
        return self.stem.flat(x)

    def _none(self, stage: int, x: Tensor) -> Float[Tensor, "B C 0 M"]:
        return x.new_zeros(len(x), self.stem.first.out_channels, 0, (x.shape[3] + 1) // 2)
