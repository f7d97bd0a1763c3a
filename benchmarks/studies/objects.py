r"""Objects that captions name but the image does not show, after CHAIR (Rohrbach et al. 2018), judged by a CLIP.

    data=../shared/data/vision
    python benchmarks/studies/objects.py $data/flickr8k-1000/test.jsonl \
        --classes recipes/data/classes.jsonl $data/tiny-imagenet/classes.jsonl

An object is a name or WordNet hypernym of one of the classes, in the singular or with an "s". It counts as absent
unless it is a name or hypernym of one of the image's `--top` most likely classes. Captions written by people, judged in
the same way, show how reliable the judge is. Prints and saves in `objects.json`, for the shipped captioner and for
people: captions, those that name an object, those that name an absent one, and the words.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch

import multimodal
from multimodal.data.datasets.class_names import VAGUE, Concept, class_names
from multimodal.data.pending import PendingItems
from multimodal.tasks.evaluate.captions import open_references, write_captions


def terms(concept: Concept) -> set[str]:
    return {term.lower() for term in (*concept.names, *concept.hypernyms)} - VAGUE


def named(caption: str, objects: Set[str]) -> set[str]:
    """The objects of one to three words that a caption names."""
    words = re.findall(r"[a-z']+", caption.lower())
    runs = {" ".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}
    return {run for text in runs for run in (text, text.removesuffix("s")) if run in objects}


def judged(captions: Iterable[tuple[int, str]], shown: Mapping[int, Set[str]], objects: Set[str]) -> dict[str, Any]:
    """Counts of (image, caption) pairs, and the absent words by how many captions name them."""
    found = [(named(caption, objects), shown[image]) for image, caption in captions]
    absent = [names - there for names, there in found]
    words = Counter(word for names in absent for word in names)
    counts = {"captions": len(found), "name_an_object": sum(bool(names) for names, _ in found)}
    return counts | {"name_an_absent_one": sum(map(bool, absent)), "absent": dict(words.most_common(12))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="images with captions")
    parser.add_argument("--classes", nargs="+", type=Path, required=True, help="JSON lines of names and hypernyms")
    parser.add_argument("--captioner", default="captioner-mini")
    parser.add_argument("--judge", default="clip-vit-16", help="a CLIP")
    parser.add_argument("--top", type=int, default=3, help="classes that count as seen")
    parser.add_argument("--beam_size", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    concepts, referenced = list(class_names(args.classes).values()), open_references(args.images)
    by_name = {concept.names[0]: terms(concept) for concept in concepts}
    objects = set().union(*by_name.values())
    classifier = multimodal.Classifier(args.judge, list(by_name), top=args.top)
    items, shown = PendingItems(referenced.images.source, referenced.images.keys), dict[int, set[str]]()
    for key, found in classifier.many(items.keyed(), keyed=True, on_error="raise"):
        shown[key] = set().union(*(by_name[one["label"]] for one in found["scores"]))
    own = write_captions(referenced, multimodal.load(args.captioner), beam_size=args.beam_size).texts
    people = [(key, text) for key in own for text in referenced.texts[key]]
    results = {args.captioner: judged(own.items(), shown, objects), "people": judged(people, shown, objects)}
    for name, row in results.items():
        print(f"{name}:", json.dumps(row), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
