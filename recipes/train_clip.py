r"""Trains the shipped contrastive model `assets/clip-vit-16`.

    data=../shared/data/vision
    python recipes/train_clip.py --data $data/tiny-imagenet $data/caltech101/train $data/flickr8k-1000/train.jsonl \
        --classes recipes/classes.jsonl --val $data/tiny-imagenet/val-0000.tar \
        --out assets/clip-vit-16 --state clip-state
    python recipes/evaluate_clip.py --model assets/clip-vit-16 --write --data $data/tiny-imagenet/val-0000.tar \
        $data/caltech101/val $data/cifar10-test

`--resume` goes on from the newest state, with the same numbers as an unbroken run.

Cost: 46 minutes on one core (AMD EPYC with AVX-512 bf16, of two shared with other work), 3.5 GB of memory.
Zero-shot with the names of all classes of a set, top-1 / top-5: Tiny ImageNet val (5,050 pictures, 202 classes)
19.7 % / 45.4 %, Caltech-101 val (400, 80 classes) 36.0 % / 63.3 %, CIFAR-10 test (5,000, 10 classes, none of its
pictures trained on) 29.9 % / 77.3 %.
"""

import time

import numpy as np
import torch
import tyro
from evaluate_clip import accuracy, class_vectors, read_labelled
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal.train.contrast import Run, Settings
from multimodal.weights.folder import save_folder


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    run = Run(settings)
    if settings.resume:
        run.resume()
    watched = read_labelled(settings.val, settings.classes, run.record, 500) if settings.val else None
    losses, began = [], time.time()
    # PyTorch's fused attention for CPUs is several times slower backwards than matrix products on short rows
    with sdpa_kernel(SDPBackend.MATH):
        while run.done < settings.steps:
            losses.append(run.step())
            last = run.done == settings.steps
            if run.done % 100 == 0 or last:
                print(
                    f"step {run.done} loss {np.mean(losses[-100:]):.4f} seconds {time.time() - began:.0f}", flush=True
                )
            if run.done % settings.every == 0 or last:
                run.save()
                if watched:
                    vectors = class_vectors(run.checkpoint(), watched.names)
                    print(f"step {run.done} zero-shot {accuracy(run.checkpoint(), vectors, watched)}", flush=True)
    save_folder(run.checkpoint(), settings.out, torch.float16)


if __name__ == "__main__":
    main(tyro.cli(Settings))
