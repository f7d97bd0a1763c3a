"""Images and recordings of a report: small copies as data URIs, and the HTML around them."""

import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.errors import MultimodalError
from multimodal.tasks.report.page import data_uri, escaped
from multimodal.tokens.audio.reading import SAMPLE_RATE
from multimodal.tokens.image.reading import read_image

EDGE = 256  # pixels of a thumbnail's longer edge
BIT_RATE = 24_000  # of a recording: 3 kB a second
UNREADABLE = (MultimodalError, OSError, ValueError)


def thumbnails(keys: Iterable[Any], read: Callable[[Any], Path | bytes | Image.Image]) -> dict[Any, str]:
    """Data URIs of the images that can be read; one warning names the others. `read`: a file, bytes or an image."""
    found, faults = {}, []
    for key in dict.fromkeys(keys):
        try:
            source = read(key)
            found[key] = thumbnail(source if isinstance(source, Image.Image) else read_image(source), EDGE)
        except UNREADABLE as error:
            faults.append(error)
    if faults:
        warnings.warn(f"cannot show {len(faults)} of {len(found) + len(faults)} images ({faults[0]})", stacklevel=2)
    return found


def thumbnail(image: Image.Image, edge: int) -> str:
    image.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "WEBP", quality=80)
    return data_uri(file.getvalue(), "image/webp")


def figure(uri: str | None, caption: str, right: bool = False) -> str:
    """An image over a caption of trusted HTML; `right` frames it."""
    image = f"<img alt='' src='{uri}'>" if uri else "<div class=gone>cannot be shown</div>"
    return f"<figure{' class=right' if right else ''}>{image}<figcaption>{caption}</figcaption></figure>"


def grid(parts: Iterable[str], kind: str = "") -> str:
    """Parts in as many columns as fit."""
    return "\n".join([f"<div class='grid {kind}'>", *parts, "</div>"])


def name_line(name: str) -> str:
    """File and folder of a path in small letters; a browser shows the whole over it."""
    end = "/".join(name.split("/")[-2:])
    return f"<small title='{escaped(name)}'>{escaped(end if len(end) <= 60 else f'…{end[-59:]}')}</small>"


def recording(wave: Float[Tensor, "T"]) -> str:
    """Data URI of a 16 kHz waveform as Opus in WebM."""
    import av  # heavy: Markdown needs none

    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=SAMPLE_RATE, layout="mono", bit_rate=BIT_RATE)
        samples = (wave.clamp(-1, 1).numpy() * 32767).round().astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE
        for one in (frame, None):
            container.mux(stream.encode(one))
    return data_uri(file.getvalue(), "audio/webm")
