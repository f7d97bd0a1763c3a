"""Convolutional subsampling of speech features, of whole recordings and of streams."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.layers import is_customized
from multimodal.blocks.masks import padding

PART = 6000  # frames, a minute
CACHED = 1 << 20  # numbers of the first convolution that stay in a processor's cache


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
        """Frames and their number in each row. Padding has no influence."""
        eager = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if eager and (features.is_cpu or features.shape[1] > PART) and not is_customized(self):
            return self._in_parts(features, lengths)
        x = features[:, None]
        for stage in range(len(self.depthwise) + 1):
            x = self.halve(stage, torch.where(padding(lengths, x.shape[2])[:, None, :, None], x, 0), 1)
            lengths = (lengths + 1) // 2
        return self.flat(x), lengths

    def _in_parts(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Row by row and part by part, since maps of the first convolution are 50 times as large as features."""
        stages, bands = len(self.depthwise) + 1, (features.shape[2] + 1) // 2
        frames = min(PART, 2 * CACHED // (self.first.out_channels * bands)) if features.is_cpu else PART
        part, made, counts = max(frames >> stages, 1), [], []
        for row, length in zip(features, lengths.tolist(), strict=True):
            sizes = [length]
            for _ in range(stages):
                sizes.append((sizes[-1] + 1) // 2)
            starts, x = range(0, sizes[-1], part), row[None, None]
            parts = [self.flat(self._between(x, sizes, stages, at, min(at + part, sizes[-1])))[0] for at in starts]
            made.append(torch.cat(parts) if parts else row.new_zeros(0, self.project.out_features))
            counts.append(sizes[-1])
        padded = nn.utils.rnn.pad_sequence(made, batch_first=True)
        count = -(-features.shape[1] // 2**stages)
        return F.pad(padded, (0, 0, 0, count - padded.shape[1])), torch.tensor(counts, device=lengths.device)

    def _between(
        self, features: Float[Tensor, "1 1 F M"], sizes: list[int], stages: int, first: int, last: int
    ) -> Float[Tensor, "1 C T K"]:
        """Frames from `first` to `last` after so many `stages`; `sizes`: frames before and after each."""
        if stages == 0:
            return features[:, :, first:last]
        start, stop = max(0, 2 * first - 1), min(sizes[stages - 1], 2 * last)
        x = self._between(features, sizes, stages - 1, start, stop)
        above, below = start - (2 * first - 1), 2 * last - stop  # padding at both ends of the whole row
        x = F.pad(x, (0, 0, 0, below)) if below else x
        return self.halve(stages - 1, x, above)[:, :, : last - first]

    def halve(self, stage: int, x: Float[Tensor, "B C F M"], padding: int = 0) -> Float[Tensor, "B D T K"]:
        """One convolution, T = ⌊(F + 2·padding - 1) / 2⌋; `x` includes the other padding frames at both ends."""
        conv = self.depthwise[stage - 1] if stage else self.first
        if padding:
            x = conv(x)
        elif is_customized(conv):
            x = conv(F.pad(x, (0, 0, 1, 0)))[:, :, 1 : 1 + (x.shape[2] - 1) // 2]
        else:
            x = F.conv2d(x, conv.weight, conv.bias, 2, (0, 1), groups=conv.groups)
        return F.relu(self.pointwise[stage - 1](x) if stage else x)

    def flat(self, x: Float[Tensor, "B C T M"]) -> Float[Tensor, "B T D"]:
        return self.project(x.transpose(1, 2).flatten(2))


class SubsampleStream:
    """`Subsample` for features in parts. Output t depends on frames factor·t ± (factor - 1), so each convolution waits
    for one later frame; `last` flushes the end of the stream."""

    def __init__(self, stem: Subsample):
        self.stem = stem
        self.pending: list[Tensor | None] = [None] * (len(stem.depthwise) + 1)

    def push(self, features: Float[Tensor, "B F M"], last: bool = False) -> Float[Tensor, "B T D"]:
        """The frames that the stream's features so far suffice for and that are new."""
        x = features[:, None]
        for stage, pending in enumerate(self.pending):
            edges = int(pending is None), int(last)  # padding at both ends of the whole stream
            x = F.pad(x if pending is None else torch.cat([pending, x], 2), (0, 0, *edges))
            count = max(x.shape[2] - 1, 0) // 2
            self.pending[stage] = x[:, :, 2 * count :]
            x = self.stem.halve(stage, x) if count else self._none(x)
        return self.stem.flat(x)

    def _none(self, x: Tensor) -> Float[Tensor, "B C 0 M"]:
        return x.new_zeros(len(x), self.stem.first.out_channels, 0, (x.shape[3] + 1) // 2)
