"""Which frames of a video are taken."""

from multimodal.errors import UsageError
from multimodal.system.options import OptionSet, option

EVENLY = 16  # frames of a video if nothing else is asked for


class VideoOptions(OptionSet):
    """Sampling of frames: by default 16 spread evenly, the middles of 16 equal parts of the video.

    `every_s`: a frame every so many seconds from 0 on. `scenes`: the first frame of each scene (see `sampling.py`).
    `max_frames`: with `every_s` evenly spread instead if there would be more; with `scenes` the greatest changes."""

    every_s: float | None = option(
        None, "use a frame of each video every S seconds", "S", low=0.001, high=1e6, also=("every",)
    )
    max_frames: int | None = option(
        None, f"use at most N frames of each video, evenly spread (default: {EVENLY}; all with --every_s or --scenes)",
        "N", low=1, high=1_000_000,
    )  # fmt: skip
    scenes: float | None = option(
        None, "use the frames of each video where a scene begins: where at least this share of the colours changes "
        "(0.3 suits films)", "SHARE", low=0, high=1, above=True,
    )  # fmt: skip

    def sampling(self) -> str:
        """The options that are set, as in "every_s=2"."""
        chosen = {name: vars(self)[name] for name in ClipOptions.declared if vars(self).get(name)}
        if not chosen.keys() & VideoOptions.declared.keys():
            chosen["max_frames"] = EVENLY
        return " ".join(f"{name}={value}" for name, value in chosen.items())

    def check(self) -> None:
        if self.every_s is not None and self.scenes is not None:
            raise UsageError(f"{self.scenes:g}: cannot be combined with every_s", argument="scenes")


class ClipOptions(VideoOptions):
    """`per_clip`: one result per video instead of one per frame: the mean of the frames' features, or the caption with
    the best score."""

    per_clip: bool = option(False, "one result per video: from the mean of its frames' features, or its best caption")
