"""Work before the model, a core: images decoded and resized, drawn for training, and recordings decoded and made into
features. The decoder alone is the floor. The curve over processes is by wall clock."""

from benchmarks.suite.cases import Candidate, Case, Options

OURS, FLOOR = "benchmarks.peers.front.ours:", "benchmarks.peers.front.decoders:"
SIZES = {"256 x 192": (256, 192), "500 x 375": (500, 375)}
FORMATS = {"FLAC, 16 kHz": "16000.flac", "FLAC, 44.1 kHz": "44100.flac", "MP3, 44.1 kHz": "44100.mp3"}
SECONDS = 60


def cases(options: Options) -> list[Case]:
    sizes, formats = (list(SIZES)[:1], list(FORMATS)[:1]) if options.tiny else (SIZES, FORMATS)
    return [*(images(name, options) for name in sizes), *(sound(name, options) for name in formats), processes(options)]


def known(options: Options, size: str) -> dict[str, object]:
    data = {"data": str(options.data)} if options.data else {}
    return {"count": 8 if options.tiny else 96, "size": SIZES[size], **data}


def images(size: str, options: Options) -> Case:
    settings = known(options, size)
    return Case(
        "front", f"{settings['count']} JPEGs of {size}", "image", settings["count"],
        (
            Candidate("ours, exact at 224", OURS + "exact", kind="exact"),
            Candidate("ours, for train_vit at 224", OURS + "drawn", {"size": 224}, kind="train_vit 224"),
            Candidate("ours, for train_vit at 64", OURS + "drawn", {"size": 64}, kind="train_vit 64"),
            Candidate("ours, for train_clip at 224", OURS + "squares", {"size": 224}, kind="train_clip 224"),
            Candidate("ours, for train_clip at 96", OURS + "squares", {"size": 96}, kind="train_clip 96"),
            Candidate("Pillow's decoder alone", FLOOR + "images", {}, "pillow", "decoder", floor=True),
        ),
        prepare="benchmarks.peers.vision.clip_jpegs:prepare", settings=settings, threads=(1,),
    )  # fmt: skip


def sound(name: str, options: Options) -> Case:
    seconds, file = 10 if options.tiny else SECONDS, {"file": FORMATS[name]}
    return Case(
        "front", f"{seconds} s of {name}", "second", seconds,
        (
            Candidate("ours, samples", OURS + "samples", file, kind="samples"),
            Candidate("ours, before Whisper", OURS + "whisper", file, kind="Whisper"),
            Candidate("ours, before the Conformer", OURS + "conformer", file, kind="Conformer"),
            Candidate("PyAV's decoder alone", FLOOR + "sound", file, "av", "decoder", floor=True),
        ),
        prepare=FLOOR + "prepare_sound", settings={"seconds": seconds, **file}, threads=(1,),
    )  # fmt: skip


def processes(options: Options) -> Case:
    settings = known(options, "256 x 192")
    made = [Candidate(f"ours, {name}", OURS + "in_processes", {"processes": count}, kind=name)
            for name, count in (("1 process", 1), ("2 processes", 2))]  # fmt: skip
    floor = Candidate("Pillow's decoder alone", FLOOR + "images", {}, "pillow", "decoder", floor=True)
    return Case(
        "front", f"{settings['count']} JPEGs of 256 x 192, exact, by processes", "image", settings["count"],
        (*made, floor), prepare="benchmarks.peers.vision.clip_jpegs:prepare", settings=settings, threads=(2,),
    )  # fmt: skip
