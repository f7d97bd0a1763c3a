"""Word error rates of a recogniser's CTC output (best path), after Whisper's English text normaliser on both sides.

    python recipes/evaluate_asr.py assets/asr-conformer-en --test an4=an4/test.jsonl ljspeech=ljspeech/test.jsonl

prints one JSON object. `--card FILE` also stores those facts and the figures as the folder's card.json.
"""

import argparse
import json
from pathlib import Path

import torch

from multimodal.train.speech import greedy_texts, load_features, read_manifest
from multimodal.weights.folder import Checkpoint, load_folder, save_folder


def word_error_rate(references: list[str], hypotheses: list[str]) -> float:
    """Errors in all utterances over the words in all references."""
    from jiwer import wer
    from whisper_normalizer.english import EnglishTextNormalizer

    normal = EnglishTextNormalizer()
    return wer([normal(text) for text in references], [normal(text) for text in hypotheses])


def evaluate(checkpoint: Checkpoint, tests: dict[str, Path], cache: Path, show: int = 0) -> dict[str, float]:
    """WER in percent of each manifest."""
    figures = {}
    for name, manifest in tests.items():
        references = [utterance.text for utterance in read_manifest(manifest)]
        found = greedy_texts(checkpoint.model, checkpoint.tokenizer, load_features(manifest, cache))
        figures[name] = round(100 * word_error_rate(references, found), 1)
        for reference, text in list(zip(references, found, strict=True))[:show]:
            print(f"{name}: {reference} | {text}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--test", nargs="+", required=True, metavar="NAME=MANIFEST")
    parser.add_argument("--cache", type=Path, default=Path("asr-cache"))
    parser.add_argument("--card", type=Path)
    parser.add_argument("--show", type=int, default=0, help="print so many transcripts of each test")
    args = parser.parse_args()
    checkpoint = load_folder(args.model)
    tests = {name: Path(path) for name, path in (spec.split("=", 1) for spec in args.test)}
    figures = evaluate(checkpoint, tests, args.cache, args.show)
    print(json.dumps(figures))
    if args.card:
        card = json.loads(args.card.read_text()) | {"figures": {f"WER % {name}": x for name, x in figures.items()}}
        saved = Checkpoint(checkpoint.model, checkpoint.tokenizer, card=card)
        save_folder(saved, args.model, dtype=torch.float16)


if __name__ == "__main__":
    main()
