"""Speed as users call it: `Classifier` on images as they hold them beside open_clip's README, `Transcriber` on
recordings beside `WhisperModel.transcribe` of faster-whisper and openai-whisper. Random weights of released sizes."""

from benchmarks.jobs.transcribe_cases import ANSWER, SAME, SIZE
from benchmarks.jobs.transcribe_cases import case as whisper_case
from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

NAME, SEVERAL, RECORDINGS, BEAMS = "ViT-B-32", 64, 8, 5
FORMS = {"arrays": "array", "images": "PIL image", "files": "JPEG file"}
PEERS = "benchmarks.peers.vision."


def cases(options: Options) -> list[Case]:
    tokens, several, recordings = (8, 4, 2) if options.tiny else (ANSWER, SEVERAL, RECORDINGS)
    return [
        *(classifying(form, count, options.tiny) for count in (1, several) for form in FORMS),
        transcribing("a recording of 30 s", 1, tokens, options.tiny),
        transcribing(f"a recording of 30 s, beams of {BEAMS}", 1, tokens, options.tiny, beams=BEAMS),
        transcribing(f"{recordings} recordings in turn", recordings, tokens, options.tiny),
        transcribing(f"{recordings} recordings, transcribe_many", recordings, tokens, options.tiny, many=True),
    ]


def classifying(form: str, count: int, tiny: bool) -> Case:
    settings = {"name": NAME, "form": form, "tiny": tiny}
    return Case(
        "calls", f"{NAME}, classify {count} {FORMS[form]}{'s' * (count > 1)}", "image", count,
        (
            *in_kinds("ours", PEERS + "ours:calls", settings, kinds=("float32", "auto")),
            Candidate("open_clip float32", PEERS + "calls:open_clip", settings, "open_clip_torch"),
        ),
        reference="open_clip float32", checks={"float32": ("near", 1e-4), "auto": ("near", 0.1)},
        prepare=PEERS + "calls:prepare", settings={"name": NAME, "count": count, "tiny": tiny},
    )  # fmt: skip


def transcribing(
    name: str, recordings: int, tokens: int, tiny: bool, beams: int = 1, many: bool = False
) -> Case:  # fmt: skip
    settings = {"size": SIZE, "tiny": tiny, "tokens": tokens, "recordings": recordings, "beams": beams, "many": many,
                "seconds": 30.0 * recordings, "tokenizer": True}  # fmt: skip
    peers = {"ours": ("float32", "int8", "auto"), "openai_whisper": ("float32",),
             "faster_whisper": ("float32", "int8")}  # fmt: skip
    return whisper_case(
        "calls", f"Whisper tiny, {name}", "second of audio", 30 * recordings, "calls", peers, settings,
        ("openai", "ctranslate2"), reference="openai-whisper float32", checks={"float32": SAME},
    )  # fmt: skip
