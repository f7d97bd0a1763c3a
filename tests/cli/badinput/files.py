"""Images and audio files that are missing, are not regular files, or have odd names."""

import os
import re
from pathlib import Path

from tests.helpers.folders import write_image, write_tone

from .rows import Row, Run, prints, silent, wrote

CLASSIFY = "--labels a,b -m {clip} --format csv"


def special() -> None:
    os.mkfifo("pipe.png")
    os.mkfifo("pipe.wav")
    Path("dead.png").symlink_to("nowhere")
    Path("loop.png").symlink_to("loop.png")
    os.mkdir("folder.png")


def named(name: str) -> Path:
    return write_image(Path(name))


def escaped(run: Run) -> None:
    assert r"r\n\x1b[31m.png" in run.out
    assert "\x1b" not in run.out + run.err


def out_in_the_way() -> None:
    write_tone(Path("other.wav"))
    os.mkdir("out/tone.txt")


ROWS = [
    Row("special files by name", f"classify pipe.png dead.png absent.png x*.png red.png {CLASSIFY}", special,
        [re.compile("pipe.png: .*not a regular file"), re.compile("dead.png: .*a broken link"),
         re.compile("absent.png.*no such file"), re.compile(r"x\*.png.*known suffixes")], prints("red.png,")),
    Row("special files in a folder", f"classify . {CLASSIFY}", special,
        [re.compile("dead.png: no such file"), re.compile("loop.png"), re.compile("pipe.png: not a regular file")],
        prints("red.png,")),
    Row("audio pipe", "transcribe pipe.wav tone.wav -m {asr} -o out -f txt", special,
        [re.compile("pipe.wav: not a regular file")], wrote("tone.txt")),
    Row("no image", f"classify bad.jpg red.png missing.png {CLASSIFY}", lambda: Path("bad.jpg").write_bytes(b"no"),
        [re.compile("missing.png"), re.compile("bad.jpg")], prints("red.png,")),
    Row("empty audio", "transcribe bad.mp3 tone.wav -m {asr} -o out -f txt", lambda: Path("bad.mp3").touch(),
        [re.compile("bad.mp3")], wrote("tone.txt")),
    Row("names that steer a terminal", "classify . --labels a,b -m {clip}",
        lambda: (named("r\n\x1b[31m.png"), Path("bad\x1b.png").write_bytes(b"no image")),
        [re.compile(r"bad\\x1b\.png")], escaped),
    Row("output in the way", "transcribe tone.wav other.wav -m {asr} -o out -f txt", out_in_the_way,
        [re.compile("out/tone.txt: cannot be written")], wrote("other.txt")),
    Row("output folder is a file", "transcribe tone.wav -m {asr} -o red.png", None, [re.compile("--output")],
        silent),
    Row("output folder below a file", "transcribe tone.wav -m {asr} -o red.png/out", None, [re.compile("red.png")],
        silent),
    Row("output to a dash", "classify red.png --labels a,b -m {clip} --output - --format csv", None,
        [re.compile("--output -: expected a file's name")], silent),
    Row("two of one name", "transcribe tone.wav sub/tone.wav -m {asr} -o out",
        lambda: (os.mkdir("sub"), write_tone(Path("sub/tone.wav"))), [re.compile(r"tone\.wav: .*tone\.\*")] * 2,
        silent),
]  # fmt: skip
