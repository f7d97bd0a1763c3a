"""Valid files of every input format, each made at first use in a child process, so that the fuzz keeps one thread
and little memory."""

import contextlib
import gzip
import io
import json
import os
import shutil
import tarfile
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.data.video_files import noise, ramp, turned, video
from tests.helpers.folders import every_kind, write_image, write_tone
from tests.helpers.paths import ROOT, SHARED_DATA

AUDIO = {"wav": ("wav", "pcm_s16le"), "flac": ("flac", "flac"), "mp3": ("mp3", "libmp3lame"),
         "opus": ("ogg", "libopus"), "m4a": ("mp4", "aac"), "webm": ("webm", "libopus"), "aiff": ("aiff", "pcm_s16be"),
         "mka": ("matroska", "aac"), "aac": ("adts", "aac"), "caf": ("caf", "pcm_s16le")}  # fmt: skip
ARPA = """\\data\\
ngram 1=5
ngram 2=4

\\1-grams:
-1.0\t</s>
-99\t<s>\t-0.3
-0.7\tred\t-0.2
-0.8\tsquare\t-0.2
-2.0\t<unk>

\\2-grams:
-0.4\t<s> red
-0.3\tred square
-0.5\tsquare </s>
-0.9\tsquare red

\\end\\
"""


class Seeds:
    """`seeds / "audio"` is the folder of that name."""

    def __init__(self, root: Path, makers: dict[str, Callable[[Path, "Seeds"], None]]):
        self.root, self.makers = root, makers

    def __truediv__(self, name: str) -> Path:
        folder = self.root / name
        if not folder.exists():
            part = folder.with_name(f".{name}.part")
            part.mkdir(parents=True)
            _in_child(lambda: self.makers[name](part, self))
            part.rename(folder)
        return folder

    def model(self, name: str) -> str:
        return str(self / "models" / name)


def renew_thread_pool() -> None:
    """Replace torch's thread pool, unusable after a fork, before several threads of autograd do it at once and race."""
    import torch

    torch.set_num_threads(1)


def _in_child(make: Callable[[], object]) -> None:
    if (child := os.fork()) == 0:
        try:
            renew_thread_pool()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                make()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a seed could not be made")


def audio(folder: Path, _: Seeds) -> None:
    import av

    random = np.random.default_rng(0)
    rate = 48000
    at = np.arange(int(rate * 1.2)) / rate
    sound = 0.4 * np.sin(2 * np.pi * (200 + 900 * at) * at) + 0.02 * random.standard_normal(len(at))
    for ending, (form, codec) in AUDIO.items():
        with av.open(str(folder / f"bad.{ending}"), "w", format=form) as container:
            stream = container.add_stream(codec, rate=rate, layout="mono")
            frame = av.AudioFrame.from_ndarray(sound.astype(np.float32)[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, 0
            fifo = av.AudioFifo()
            fifo.write(frame)
            while part := fifo.read(960, partial=True):
                container.mux(stream.encode(part))
            container.mux(stream.encode(None))
    (folder / "speech").mkdir()
    for path in [ROOT / "assets" / "sample" / "german.flac", *sorted(SHARED_DATA.glob("speech/an4/audio/test/*"))[:3]]:
        shutil.copy(path, folder / "speech")


def images(folder: Path, _: Seeds) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 255, (40, 60, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[274] = 6
    for ending in ("png", "jpg", "webp", "gif", "tif", "bmp", "ppm", "qoi", "avif", "jp2"):
        image.save(folder / f"bad.{ending}", **({"exif": exif} if ending == "jpg" else {}))
    more = folder / "more"
    more.mkdir()
    other = Image.fromarray(pixels[::-1])
    for ending in ("gif", "png", "webp", "tif"):
        image.save(more / f"several.{ending}", save_all=True, append_images=[other, image])
    image.save(more / "progressive.jpg", progressive=True, quality=60)
    image.convert("CMYK").save(more / "cmyk.jpg")
    image.convert("P").save(more / "palette.png", transparency=3)
    Image.fromarray(random.integers(0, 65535, (30, 40), np.uint16)).save(more / "deep.png")
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        image.save(more / f"{compression}.tif", compression=compression)
    image.save(more / "lossless.webp", lossless=True)
    image.convert("L").save(more / "grey.bmp")


def videos(folder: Path, _: Seeds) -> None:
    stills = noise(6)
    for form, codec in (("mp4", "libx264"), ("mkv", "libx264"), ("avi", "mpeg4"), ("mov", "mjpeg"), ("mov", "png")):
        data = video(stills, form={"mkv": "matroska"}.get(form, form), codec=codec, sound=0.6 * (form == "mp4"))
        (folder / f"{codec}.{form}").write_bytes(data)
    (folder / "turned.mp4").write_bytes(turned(video(ramp(6)), 0, 1, -1, 0))
    (folder / "cover.mp4").write_bytes(video(ramp(1), codec="mjpeg", sound=0.5, cover=True))


def lists(folder: Path, _: Seeds) -> None:
    """Lists beside their files; every list's good rows name good files."""
    for name in ("red", "blue", "green"):
        write_image(folder / f"{name}.png", name)
    for number in range(3):
        write_tone(folder / f"{number}.wav", seconds=0.3 + number / 10)
    names = ["red", "blue", "green"]
    rows = [{"path": f"{name}.png", "label": name, "text": f"a {name} square"} for name in names]
    _table(folder / "images.csv", rows, ",")
    _table(folder / "images.tsv", rows, "\t")
    _json_lines(folder / "images.jsonl", rows)
    _json_lines(folder / "captions.jsonl", [{"image": r["path"], "captions": [r["text"], "a wall"]} for r in rows])
    (folder / "metadata.jsonl").write_text((folder / "images.jsonl").read_text())
    _json_lines(folder / "predictions.jsonl", [{"file": r["path"], "caption": r["text"]} for r in rows])
    speech = [{"audio_filepath": f"{i}.wav", "text": f"word {i}", "duration": 0.3 + i / 10} for i in range(3)]
    _json_lines(folder / "audio.jsonl", speech)
    _table(folder / "audio.csv", speech, ",")
    (folder / "labels.txt").write_text("red\nblue\ngreen\n")
    (folder / "labels.json").write_text(json.dumps({name: [f"a {name} wall", name] for name in names}))
    (folder / "templates.txt").write_text("a photo of a {}\na drawing of {}\n")
    _json_lines(folder / "classes.jsonl", [{"id": name, "name": f"{name} wall"} for name in names])
    (folder / "prompts.txt").write_text("once upon\na time\nthere was\n")
    _json_lines(folder / "examples.jsonl", [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}])
    (folder / "examples.tsv").write_text("a\tb\nc\td\n")
    (folder / "words.arpa").write_text(ARPA)
    (folder / "words.arpa.gz").write_bytes(gzip.compress(ARPA.encode()))
    (folder / "preprocessing.json").write_text(json.dumps({
        "size": [32, 32], "resize": "shortest", "interpolation": "bicubic", "mean": [0.5] * 3, "std": [0.5] * 3,
        "fill": 0, "crop": 1.0,
    }))  # fmt: skip


def _table(path: Path, rows: list[dict], separator: str) -> None:
    lines = [list(rows[0]), *(map(str, row.values()) for row in rows)]
    path.write_text("".join(separator.join(line) + "\n" for line in lines))


def _json_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tars(folder: Path, seeds: Seeds) -> None:
    source = seeds / "lists"
    images = [
        (f"{n}.{e}", d)
        for n in ("red", "blue", "green")
        for e, d in (
            ("png", (source / f"{n}.png").read_bytes()),
            ("cls", n.encode()),
            ("json", json.dumps({"text": n}).encode()),
        )
    ]
    sounds = [
        (f"{n}.{e}", d)
        for n in "012"
        for e, d in (("wav", (source / f"{n}.wav").read_bytes()), ("txt", f"word {n}".encode()))
    ]
    for name, members in (("images", images), ("audio", sounds)):
        for ending, mode in ((".tar", "w"), (".tar.gz", "w:gz")):
            with tarfile.open(folder / f"{name}{ending}", mode) as tar:
                for member, data in members:
                    entry = tarfile.TarInfo(member)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


def made(folder: Path, seeds: Seeds) -> None:
    """Files that commands write and read again: a classifier, results, indexes of each kind."""
    from multimodal.cli.main import main

    os.chdir(folder)
    os.mkdir("images")
    for number in range(90):  # enough for ivf
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(f"images/{number:02}.png")
    clip, some = seeds.model("clip"), ["images/00.png", "images/01.png", "images/02.png"]
    labels = ["--labels", "red,blue", "-m", clip]
    for words in (
        ["classify", some[0], *labels, "--save_classifier", "saved.safetensors", "--threshold", "0.2"],
        ["classify", *some, *labels, "-o", "classes.csv"], ["classify", *some, *labels, "-o", "classes.jsonl"],
        ["caption", *some, "-m", seeds.model("captioner"), "-o", "captions.csv"],
        *(["index", "images", "-m", clip, "-o", kind, "--kind", kind] for kind in ("flat", "ivf")),
    ):  # fmt: skip
        try:
            main(words)
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(words) from None


def states(folder: Path, _: Seeds) -> None:
    from tests.helpers.tiny_run import loop

    loop(folder / "run", steps=2, save_every=1).fit()


def _models(folder: Path, _: Seeds) -> None:
    every_kind(folder)


MAKERS: dict[str, Callable[[Path, Seeds], None]] = {
    "models": _models, "audio": audio, "images": images, "videos": videos, "lists": lists, "tars": tars, "made": made,
    "states": states,
}  # fmt: skip
