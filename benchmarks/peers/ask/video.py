"""Frames of a long video: one at a time as the readers give them, reduced to a mean colour each."""

from collections.abc import Callable
from pathlib import Path

FRAMES, RATE, SIZE = 16, 5, (640, 360)  # sampled; per second; width and height
STEP = 8  # of the pixels whose mean is taken
Colours = list[list[float]]


def prepare(folder: Path, device: str, seconds: int) -> None:
    """`folder/video.mp4`: H.264, with noise in which every frame differs from the one before."""
    import av
    import numpy as np

    draw = np.random.default_rng(0)
    noise = draw.integers(0, 200, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
    with av.open(str(folder / "video.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "ultrafast", "crf": "35"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(seconds * RATE):
            image = np.roll(noise, 3 * number, 1) + np.uint8(50 * number / (seconds * RATE))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def middles(total: int) -> list[int]:
    """Numbers of the frames in the middles of equal parts."""
    return [int((part + 0.5) * total / FRAMES) for part in range(FRAMES)]


def transformers(folder: Path, device: str) -> Callable[[], Colours]:
    from transformers.video_utils import load_video

    def chosen(metadata: "object", **_: "object") -> list[int]:
        return middles(metadata.total_num_frames)

    path = str(folder / "video.mp4")
    return lambda: (
        load_video(path, sample_indices_fn=chosen, backend="pyav")[0][:, ::STEP, ::STEP].mean((1, 2)).tolist()
    )
