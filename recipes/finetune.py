r"""Fine-tune any checkpoint that `load` accepts: ViT and CLIP on images, Whisper and joint Conformer on speech.

    data=data
    python recipes/finetune.py --model assets/clip-vit-16 --task classify --data $data/vision/caltech101/train \
        --val $data/vision/caltech101/val --run tune --out clip-caltech --steps 300 --threads 1
    python recipes/finetune.py --model assets/asr-conformer-en --data $data/speech/an4/train.jsonl \
        --val $data/speech/an4/test.jsonl --run tune-an4 --out asr-an4 --steps 300 --threads 1

Tasks: `classify` (a ViT, or a CLIP's image tower with a head that starts from the text vectors of the class names),
`match` (a CLIP on captions or templated class names), `transcribe` (Whisper's format), `recognize` (joint Conformer);
without `--task`, `match` for a CLIP. `--freeze image text.stack` freezes parts (`all`: all but a new head),
`--lora_rank 8` trains low-rank adapters and merges them into the weights at the end. Tokenizer and preprocessing stay.

Results, one core: `clip-vit-16` on Caltech-101 with 200 steps, top-1 of 400 images of 80 classes, 36.0 % before
(zero-shot; its training had these images): `--task classify --rate 3e-4` 39.8 %, `--lora_rank 8 --rate 1e-3` 37.5 %,
`--freeze all --rate 1e-3` 35.5 %, `--task match --lora_rank 8 --rate 1e-3` 40.0 %; 1 to 3 minutes each (`classify` then
trained without the model's drop path of 0.05). The recognizer of revision a77fa31 on AN4 with 60 steps: greedy WER
20.8 % before, 19.0 % after.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from multimodal.errors import UsageError
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.lora import LoraSettings, adapt, merge
from multimodal.train.objectives.finetune.images import classify, match
from multimodal.train.objectives.finetune.job import FinetuningData, FinetuningJob
from multimodal.train.objectives.finetune.speech import recognize, transcribe
from multimodal.weights.card import inherited
from multimodal.weights.files.store_options import Store
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

CLASSES = Path(__file__).parent / "data" / "classes.jsonl"
# task → kinds of checkpoint, and the function that prepares the job
TASKS: dict[str, tuple[tuple[type[nn.Module], ...], Callable[..., FinetuningJob]]] = {
    "match": ((CLIP,), match),
    "classify": ((ViT, CLIP), classify),
    "transcribe": ((Whisper,), transcribe),
    "recognize": ((ConformerCTC,), recognize),
}


@dataclass(frozen=True)
class NamedFinetuningData(FinetuningData):
    classes: tuple[Path, ...] = (CLASSES,)  # JSONL files of class names by id, besides one beside the data


@dataclass(frozen=True)
class FinetuningRun:
    model: str  # checkpoint to start from: a shipped name, a folder, a file, a hub's repository
    out: Path  # folder for the trained checkpoint
    data: NamedFinetuningData
    task: Literal["classify", "match", "transcribe", "recognize"] | None = None
    store: Store = "float32"  # number type of the stored weights
    adapt: LoraSettings = LoraSettings()
    loop: LoopSettings = LoopSettings(
        Path("tune"), 500, OptimSettings(3e-4, warmup=30, average=0.99), save_every=100, evaluate_every=100
    )


def job(s: FinetuningRun, initial: Checkpoint) -> FinetuningJob:
    """Prepare the job. Raises UsageError for a task that the model cannot do."""
    fit = [name for name, (kinds, _) in TASKS.items() if isinstance(initial.model, kinds)]
    if not fit:
        raise UsageError(f"--model {s.model}: expected a ViT, CLIP, Whisper or Conformer, got {initial.kind}")
    if s.task is not None and s.task not in fit:
        raise UsageError(f"--task {s.task}: not for a {initial.kind}, which can do {' or '.join(fit)}")
    return TASKS[s.task or fit[0]][1](initial, s.data, s.loop.run / "cache", s.loop.seed)


def main(s: FinetuningRun) -> dict[str, Any]:
    torch.manual_seed(s.loop.seed)
    initial = load(s.model)
    made = job(s, initial)
    adapt(made.tuned, s.adapt, made.fresh)
    log.info("%d items", len(made.source))
    loader = s.loop.loader(made.source, made.plan, made.prepare, made.collate)

    def watch(model: nn.Module, step: int) -> dict[str, float | None]:
        return made.measure(model, s.data.count)

    def whole(model: nn.Module) -> dict[str, float | None] | None:
        return made.measure(model.eval().to(s.loop.device), None) if made.measure else None

    figures = {"before": whole(made.objective.model)}
    begun = made.finish(made.objective.model)
    trained = merge(Loop(s.loop, made.objective, loader, watch if made.measure else None, begun).fit())
    figures |= {"after": whole(trained)}
    done = made.finish(trained.cpu())
    card = inherited(done.card) | {
        "fine_tuned": {"from": s.model, "data": list(s.data.data), s.data.val or "val": figures}
    }
    finish(s, replace(done, card=card), [*s.data.data, s.data.val], figures=figures, store=s.store)
    return figures


if __name__ == "__main__":
    start(main)
