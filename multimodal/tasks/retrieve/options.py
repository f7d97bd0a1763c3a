"""Options of image indexes and of searches in them."""

from multimodal.inference.options import BatchOptions
from multimodal.system.options import option
from multimodal.tokens.video.options import ClipOptions, VideoOptions

RECALL = 0.95


class IndexOptions(BatchOptions, ClipOptions):
    """None: as the index has it."""

    kind: str | None = option(
        None, "flat: exact search; ivf: inverted lists; auto: flat up to 200,000 images, else ivf "
        "(default: that of the index, else auto)", choices=("auto", "flat", "ivf"),
    )  # fmt: skip
    recall: float | None = option(
        None, f"recall@10 that ivf is tuned to reach (default: that of the index, else {RECALL})", "SHARE",
        low=0, high=1, above=True,
    )  # fmt: skip
    dtype: str | None = option(None, "type of the stored vectors (default: that of the index, else float16)",
                               choices=("float16", "float32"))  # fmt: skip


class SearchOptions(VideoOptions):
    top: int = option(10, "images per query", "N", low=1)
    exact: bool = option(False, "compare with every image (default: use the index's lists)")
