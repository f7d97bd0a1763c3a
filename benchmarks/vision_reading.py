"""Text to ids and files to pixels, beside the libraries that do the same; results are equal before they are timed.

    python benchmarks/vision_reading.py [--data ../shared/data] [--rounds 7]

Parts of `vision.py`, which keeps the figures. All run in turns in one process, so that drift of the machine's speed
falls on all alike; figures are medians of the rounds, ratios medians of each round's (peer / ours: above 1, ours is
quicker). "core" figures are by the time that cores worked, which other programs on the machine change less.
Tokenizing: 10,000 captions (Multi30k of `--data`, else ImageNet's names in CLIP's templates), PyTorch on one thread,
`tokenizers` on all cores. Reading: JPEG files of quality 90, one thread; sides of 400 pixels cut out of matplotlib's
sample photograph, or the photographs of Flickr8k in `--data` at that size.
"""

import argparse
import gzip
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from multimodal.tasks.pictures import batches
from multimodal.tokens.image import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text import CLIPTokenizer
from multimodal.tokens.tokenizer import TextCut

CAPTIONS, PICTURES, LETTERS, BATCH = 10_000, 96, 100_000, 32
RECORD = Preprocessing((224, 224), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
SIDES = {"long side 400": (400, 300), "short side 400": (533, 400)}
START, END = "<|startoftext|>", "<|endoftext|>"


def in_turns(jobs: dict[str, Callable[[], Any]], rounds: int, ours: str, count: int) -> dict[str, Any]:
    """Median things a second of each job, by the clock and by the time that all cores worked, and the median of each
    peer's time over that of `ours`."""
    for job in jobs.values():
        job()
    found: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in jobs} for clock in ("clock", "cores")}
    for turn in range(rounds):
        names = list(jobs)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start, worked = time.perf_counter(), time.process_time()
            jobs[name]()
            found["clock"][name].append(time.perf_counter() - start)
            found["cores"][name].append(time.process_time() - worked)

    def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
        pairs = {name: zip(own, seconds[ours], strict=True) for name, own in seconds.items() if name != ours}
        return {name: round(statistics.median(peer / own for peer, own in both), 2) for name, both in pairs.items()}

    def speeds(seconds: dict[str, list[float]]) -> dict[str, int]:
        return {name: round(count / statistics.median(own)) for name, own in seconds.items()}

    return {
        "per_second": speeds(found["clock"]), "ratio": ratios(found["clock"]),
        "per_core_second": speeds(found["cores"]), "core_ratio": ratios(found["cores"]),
    }  # fmt: skip


def captions(data: Path | None) -> list[str]:
    if data is not None:
        lines = gzip.decompress((data / "text/multi30k/train.en.gz").read_bytes()).decode().split("\n")
        return [line for line in lines if line and "&" not in line][:CAPTIONS]  # the raw pipeline keeps "&amp;"
    from open_clip import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    return [template(name) for name in IMAGENET_CLASSNAMES for template in OPENAI_IMAGENET_TEMPLATES[:10]]


def raw_pipeline() -> Any:
    """CLIP's tokenizer in the `tokenizers` library, built as transformers' CLIPTokenizer builds it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    file = Path(find_spec("open_clip").submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    merges = [tuple(line.split()) for line in gzip.decompress(file.read_bytes()).decode().split("\n")[1:48895]]
    tokens = [*CLIPTokenizer()._tokens, START, END]
    made = Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, continuing_subword_prefix="",
        end_of_word_suffix="</w>", fuse_unk=False, unk_token=END,
    ))  # fmt: skip
    blanks = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), blanks, normalizers.Lowercase()])
    pattern = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
    words = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.post_processor = processors.RobertaProcessing((END, 49407), (START, 49406), False, False)
    return made


def tokenizing(rounds: int, data: Path | None = None) -> dict[str, Any]:
    """Captions a second, with tokenizers that have seen them and with new ones; seconds for one endless word."""
    import open_clip.tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # open_clip turns it off at import
    texts, ours, raw = captions(data), CLIPTokenizer(), raw_pipeline()
    reference = open_clip.tokenizer.SimpleTokenizer()
    batch = ours.batch(texts)
    rows = [row[mask].tolist() for row, mask in zip(batch.ids, batch.mask, strict=True)]
    assert rows == [one.ids for one in raw.encode_batch(texts)]
    assert torch.equal(ours.batch(texts, 77, pad_to_length=True).ids, reference(texts))
    seen = {
        "multimodal batch": lambda: ours.batch(texts),
        "multimodal encode": lambda: [ours.encode(text) for text in texts],
        "tokenizers encode_batch": lambda: raw.encode_batch(texts),
        "tokenizers encode_batch_fast": lambda: raw.encode_batch_fast(texts),
        "tokenizers encode": lambda: [raw.encode(text).ids for text in texts],
        "open_clip": lambda: reference(texts),
    }
    found = {"captions": len(texts), "words seen": in_turns(seen, rounds, "multimodal batch", len(texts))}
    found["words new"] = _words_new(texts, rounds)
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS))
    found["one word"] = {
        f"multimodal batch, {LETTERS} letters": round(_seconds(lambda: _cut(CLIPTokenizer(), letters)), 3),
        f"open_clip, {LETTERS // 10} letters": round(_seconds(lambda: reference(letters[: LETTERS // 10])), 3),
    }
    return found


def _words_new(texts: Sequence[str], rounds: int) -> dict[str, Any]:
    """Of tokenizers that keep nothing yet; making them is not timed."""
    new = {"multimodal batch": [CLIPTokenizer() for _ in range(rounds + 1)]}
    new["tokenizers encode_batch_fast"] = [raw_pipeline() for _ in range(rounds + 1)]
    jobs = {
        "multimodal batch": lambda: new["multimodal batch"].pop().batch(texts),
        "tokenizers encode_batch_fast": lambda: new["tokenizers encode_batch_fast"].pop().encode_batch_fast(texts),
    }
    return in_turns(jobs, rounds, "multimodal batch", len(texts))


def _cut(tokenizer: CLIPTokenizer, text: str) -> None:
    with warnings.catch_warnings(action="ignore", category=TextCut):
        tokenizer.batch([text])


def _seconds(job: Callable[[], Any]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def photographs(folder: Path, size: tuple[int, int], data: Path | None) -> list[Path]:
    """`PICTURES` JPEG files, wide and tall in turn."""
    draw, files = random.Random(0), []
    if data is not None:
        found = sorted((data / "vision/flickr8k-1000/images").glob("*.jpg"))[:PICTURES]
    else:
        import matplotlib

        found = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"] * PICTURES
    for number, file in enumerate(found):
        with Image.open(file) as picture:
            picture = picture.convert("RGB")
        if data is None:
            short, long = sorted(size)
            left, top = draw.randrange(picture.width - short), draw.randrange(picture.height - long)
            picture = picture.crop((left, top, left + short, top + long))
            picture = picture if number % 2 else picture.transpose(Image.Transpose.ROTATE_90)
        else:
            picture = picture.resize(size if picture.width > picture.height else size[::-1], Image.Resampling.BICUBIC)
        files.append(folder / f"{number:03}.jpg")
        picture.save(files[-1], quality=90)
    return files


def reading(rounds: int, data: Path | None = None) -> dict[str, Any]:
    """Pictures a second of one thread, from file to normalised pixels, beside open_clip's transform (torchvision)."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(size=RECORD.size, mean=OPENAI_MEAN, std=OPENAI_STD), is_train=False)

    def theirs(files: Sequence[Path]) -> list[torch.Tensor]:
        return [torch.stack([transform(Image.open(f)) for f in files[i : i + BATCH]])
                for i in range(0, len(files), BATCH)]  # fmt: skip

    def ours(files: Sequence[Path], workers: int) -> list[torch.Tensor]:
        return [part.pixels for part in batches(files, RECORD, BATCH, workers)]

    found: dict[str, Any] = {}
    for name, size in SIDES.items():
        with tempfile.TemporaryDirectory() as folder:
            files = photographs(Path(folder), size, data)
            assert torch.equal(torch.cat(ours(files, 1)), torch.cat(theirs(files)))
            jobs = {
                "multimodal": lambda files=files: ours(files, 1),
                "multimodal, a thread a core": lambda files=files: ours(files, len(os.sched_getaffinity(0))),
                "open_clip": lambda files=files: theirs(files),
                "Pillow's decoder alone": lambda files=files: [np.asarray(Image.open(file)).shape for file in files],
            }
            found[name] = in_turns(jobs, rounds, "multimodal", len(files))
            found[name]["mean_bytes"] = round(statistics.mean(file.stat().st_size for file in files))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"tokenizing": tokenizing(options.rounds, options.data), "reading": reading(options.rounds, options.data)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
