r"""Video clips with questions, as conversations to train and to evaluate an any-to-text model.

    python recipes/any/ask_clips.py questions/train/clips.jsonl --count 4000 --stills data/vision/caltech101/train
    python recipes/any/ask_clips.py questions/test/clips.jsonl --count 200 --stills data/vision/caltech101/val --seed 1

Each clip is 96x96 and four seconds long, H.264 in MP4: a coloured shape that moves, one that blinks, or two things one
after the other (shapes, or a still photograph), in front of a plain colour or a still. A third of the clips has a
spoken sentence on the audio track (espeak-ng). A thousand clips take about a minute of one core.
"""

import itertools
import random
import subprocess
import tempfile
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageEnhance

from multimodal.data.datasets.chats import question, refuse_foreign, write_chats
from multimodal.data.remote.trust import Trust
from multimodal.data.sources import Source, open_source
from multimodal.system.files import read_json
from multimodal.system.options import Positive, Share
from multimodal.tokens.image.reading import read_image
from multimodal.train import log, start

SIDE, RATE, FRAMES = 96, 8, 32  # pixels, frames per second, frames
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 70, 220), "yellow": (235, 215, 40),
           "white": (245, 245, 245), "purple": (150, 50, 180), "orange": (245, 140, 20)}  # fmt: skip
SHAPES = ("circle", "square", "triangle")
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NUMBERS = ("zero", "one", "two", "three")
SLOTS = 8  # equal parts of a clip; a blinking shape is away for whole parts
NOUNS, DEEDS = ("dog", "child", "man", "woman", "boy", "girl"), ("runs", "sleeps", "plays", "jumps", "sits", "walks")
NARRATION = read_json(Path(__file__).parents[1] / "data" / "questions.json")["narration"][0]
PLACES = ("in the park", "on the beach", "in the street", "at home", "in the snow")


@dataclass(frozen=True)
class ClipQuestions:
    out: tyro.conf.Positional[Path]  # JSON lines; clips lie in the folder of that name beside it
    count: Positive
    stills: str | None = None  # folder of photographs
    narrated: Share = 0.35  # share of the clips with speech
    turns: bool = False  # one conversation a clip with all its questions, instead of a row each
    seed: int = 0
    trust: Trust = Trust()


@dataclass(frozen=True)
class Thing:
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


class Scene:
    """Draws the things of one clip."""

    def __init__(self, draw: random.Random, stills: Source | None):
        self.draw, self.stills = draw, stills
        self.size = draw.randint(28, 44)
        self.ground = self.still(0.35) if stills is not None and draw.random() < 0.4 else self.plain()

    def plain(self) -> Image.Image:
        shade = self.draw.randint(0, 70)
        return Image.new("RGB", (SIDE, SIDE), tuple(shade + self.draw.randint(0, 20) for _ in range(3)))

    def still(self, brightness: float = 1.0) -> Image.Image:
        key = self.draw.randrange(len(self.stills))
        image = read_image(self.stills.read(key).media).convert("RGB")
        side = min(image.size)
        box = ((image.width - side) // 2, (image.height - side) // 2)
        cut = image.crop((*box, box[0] + side, box[1] + side)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return ImageEnhance.Brightness(cut).enhance(brightness)

    def thing(self) -> Thing:
        return Thing(self.draw.choice(list(COLOURS)), self.draw.choice(SHAPES))

    def place(self) -> tuple[float, float]:
        return tuple(self.draw.uniform(self.size, SIDE - self.size) for _ in range(2))

    def drawn(self, thing: Thing, x: float, y: float) -> Image.Image:
        image, r = self.ground.copy(), self.size / 2
        pen, colour = ImageDraw.Draw(image), COLOURS[thing.colour]
        if thing.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        elif thing.shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        else:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
        return image


Asked = list[tuple[str, str, str]]  # question, answer, task


def where(thing: Thing, x: float, y: float) -> Asked:
    """The corner in which a thing is at first, if it is clear."""
    if min(abs(x - SIDE / 2), abs(y - SIDE / 2)) < 5:
        return []
    corner = f"{'top' if y < SIDE / 2 else 'bottom'} {'left' if x < SIDE / 2 else 'right'}"
    return [(f"Where is the {thing.shape} at first?", corner, "place")]


def moving(scene: Scene) -> tuple[list[Image.Image], Asked]:
    thing, way = scene.thing(), scene.draw.choice(list(WAYS))
    (dx, dy), reach = WAYS[way], scene.draw.uniform(40, SIDE - 8 - scene.size)
    x, y = (SIDE / 2 - d * reach / 2 if d else p for d, p in zip((dx, dy), scene.place(), strict=True))
    steps = [reach * i / (FRAMES - 1) for i in range(FRAMES)]
    frames = [scene.drawn(thing, x + dx * s, y + dy * s) for s in steps]
    return frames, [
        (f"Which way does the {thing.shape} move?", way, "motion"),
        (f"What colour is the {thing.shape}?", thing.colour, "colour"),
        *where(thing, x, y),
    ]


def blinking(scene: Scene) -> tuple[list[Image.Image], Asked]:
    """The shape is away in one to three of the parts 1 to 6, never in two that touch."""
    thing, place, count = scene.thing(), scene.place(), scene.draw.randint(1, 3)
    apart = lambda slots: all(b - a > 1 for a, b in itertools.pairwise(slots))
    away = scene.draw.choice(list(filter(apart, itertools.combinations(range(1, SLOTS - 1), count))))
    shown, hidden = scene.drawn(thing, *place), scene.ground
    frames = [hidden if i * SLOTS // FRAMES in away else shown for i in range(FRAMES)]
    return frames, [
        (f"How many times does the {thing.shape} blink?", NUMBERS[count], "blinks"),
        (f"What colour is the {thing.shape}?", thing.colour, "colour"),
        *where(thing, *place),
    ]


def ordered(scene: Scene) -> tuple[list[Image.Image], Asked]:
    first = scene.thing()
    while str(second := scene.thing()) == str(first):
        pass
    things = [(f"the {one}", scene.drawn(one, *scene.place())) for one in (first, second)]
    if scene.stills is not None and scene.draw.random() < 0.3:
        things[1] = ("a photo", scene.still())
        scene.draw.shuffle(things)
    turn = scene.draw.randint(FRAMES * 3 // 8, FRAMES * 5 // 8)
    frames = [things[0][1]] * turn + [things[1][1]] * (FRAMES - turn)
    return frames, [("What comes first?", things[0][0], "order"), ("What comes last?", things[1][0], "order")]


def sentence(draw: random.Random) -> str:
    if draw.random() < 0.4:
        return " ".join(draw.choice(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"))
                        for _ in range(draw.randint(2, 4)))  # fmt: skip
    return f"the {draw.choice(NOUNS)} {draw.choice(DEEDS)} {draw.choice(PLACES)}"


def spoken(text: str, draw: random.Random) -> tuple[np.ndarray, int]:
    """Samples of an espeak-ng voice, and their rate."""
    voice = draw.choice(("en-us", "en-gb")) + draw.choice(("", "+m3", "+f2", "+f4"))
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        command = ["espeak-ng", "-v", voice, "-s", str(draw.randint(175, 205)), "-w", file.name, text]
        subprocess.run(command, check=True, capture_output=True)
        with wave.open(file.name) as sound:
            return np.frombuffer(sound.readframes(sound.getnframes()), np.int16), sound.getframerate()


def encode(path: Path, frames: list[Image.Image], sound: tuple[np.ndarray, int] | None) -> None:
    import av

    with av.open(str(path), "w") as file:
        video = file.add_stream("libx264", rate=RATE, options={"crf": "20"})
        video.width, video.height, video.pix_fmt = SIDE, SIDE, "yuv420p"
        track = file.add_stream("aac", rate=sound[1], layout="mono") if sound else None
        for frame in frames:
            file.mux(video.encode(av.VideoFrame.from_image(frame)))
        file.mux(video.encode())
        if track is not None:
            samples, rate = sound
            for start in range(0, len(samples), 1024):
                frame = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], "s16", "mono")
                frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
                file.mux(track.encode(frame))
            file.mux(track.encode())


def made(number: int, s: ClipQuestions, stills: Source | None) -> list[dict[str, Any]]:
    """Write a clip; return its questions."""
    draw = random.Random(f"{s.seed} {number}")
    frames, asked = draw.choice((moving, moving, blinking, ordered, ordered))(Scene(draw, stills))
    sound = None
    if draw.random() < s.narrated:
        said = sentence(draw)
        sound = spoken(said, draw)
        asked.append((NARRATION, said, "narration"))
    path = s.out.with_suffix("") / f"{number:05d}.mp4"
    encode(path, frames, sound)
    name = f"{path.parent.name}/{path.name}"
    if s.turns:
        draw.shuffle(asked)
        return [conversation(name, asked)]
    return [
        question(text, [answer], task, "wer" if task == "narration" else "exact", video=name) | {"language": "en"}
        for text, answer, task in asked
    ]


def conversation(video: str, asked: Asked) -> dict[str, Any]:
    """A row in which the questions follow each other; the video comes with the first."""
    messages: list[dict[str, Any]] = []
    for number, (text, answer, _) in enumerate(asked):
        part = {"type": "text", "text": text}
        content = [{"type": "video", "path": video}, part] if number == 0 else text
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "task": "conversation"}


def rows(s: ClipQuestions) -> Iterator[dict[str, Any]]:
    stills = open_source(s.stills, trust=s.trust) if s.stills else None
    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(lambda number: made(number, s, stills), range(s.count)):
            yield from part


def main(s: ClipQuestions) -> None:
    refuse_foreign(s.out)
    s.out.unlink(missing_ok=True)  # after a stop its answers would stand beside other clips
    s.out.with_suffix("").mkdir(parents=True, exist_ok=True)
    log.info("%s: %d questions about %d clips", s.out, write_chats(s.out, rows(s)), s.count)


if __name__ == "__main__":
    start(main)
