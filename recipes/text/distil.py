r"""Distils a text model (Sanh et al. 2019): a student with half of its layers, beside one that learns alone as long.

    data=../shared/data/text
    python recipes/text/distil.py --teacher lm --data $data/tinyshakespeare/input.txt --run distil-run --out lm-small \
        --threads 1

The teacher is a language model of train_lm.py or a masked one of train_mlm.py, as a checkpoint folder. Its vocabulary
and context are the student's. The report has the perplexity of the teacher, of the student before and after, and of a
student of the same size without teacher and its layers (`run/alone`).

Cost: 25 minutes of a core shared with other work (AMD EPYC), 1.1 GB, the student alone included. Perplexity a character
of train_lm.py's model 4.54, of every second layer of it 6.61, of the student after 600 steps 5.01, of the one alone
after as many 5.98.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from multimodal.data.batching import stack_fields
from multimodal.data.datasets.documents import read_documents, windows
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, Windows, held_out, texts_in
from multimodal.data.loader import Loader, generator
from multimodal.errors import CheckpointError, UsageError, demand
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.perplexity import text_scores
from multimodal.train.loop import Loop
from multimodal.train.objective import Objective
from multimodal.train.objectives.text.distillation import Distillation, student_config, student_of
from multimodal.train.objectives.text.language import Language, gpt2_weights
from multimodal.train.objectives.text.masked import CollateMasked, MaskedLanguage, MaskedTexts, masked_figures
from multimodal.train.objectives.text.masking import Masker, MaskSettings
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import start
from multimodal.train.report import write_report
from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, load_folder, save_folder

log = logging.getLogger(__name__)

Figures = Callable[[TextTransformer], dict[str, float]]


def _loop() -> LoopSettings:
    optim = OptimSettings(rate=2e-3, optimizer="muon", warmup=50, weight_decay=0.1, average=0.99)
    return LoopSettings(Path("distil-run"), 600, optim, evaluate_every=300)


@dataclass(frozen=True)
class DistillationRun:
    teacher: Path  # checkpoint folder of a text model
    data: tuple[Path, ...]  # text files, plain or gzip
    out: Path  # folder of the student
    val: tuple[Path, ...] = ()  # validation text; without it the last `hold` of the training text
    hold: float = 0.1
    layers: int = 0  # of the student; 0: half of the teacher's
    temperature: float = 2.0
    soft: float = 5.0  # weight of the teacher's guesses
    task: float = 2.0  # weight of the task itself
    cosine: float = 1.0  # weight of the states' direction
    batch: int = 16  # rows of the teacher's context
    alone: bool = True  # train a student without teacher too
    mask: MaskSettings = field(default_factory=MaskSettings)  # of a masked teacher
    loop: LoopSettings = field(default_factory=_loop)

    def __post_init__(self):
        demand("temperature", self.temperature, self.temperature > 0, "over 0")
        for name in ("soft", "task", "cosine"):
            demand(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        demand("task", self.task, self.soft + self.task + self.cosine > 0, "over 0 where the others are 0")
        demand("hold", self.hold, 0 < self.hold < 1, "over 0, under 1")
        demand("batch", self.batch, self.batch >= 1, "1 or more")


def teacher_of(s: DistillationRun) -> Checkpoint:
    """Raises CheckpointError or UsageError for a folder without a text model that guesses tokens."""
    known = load_folder(s.teacher)
    if not isinstance(known.model, TextTransformer) or known.model.config.tied is None:
        raise UsageError(f"--teacher {s.teacher}: is a {known.kind} that guesses no tokens")
    if known.tokenizer is None:
        raise CheckpointError(f"--teacher {s.teacher}: has no tokenizer")
    return known


def causal_parts(s: DistillationRun, teacher: Checkpoint) -> tuple[Callable[[], Loader], Figures]:
    """Loader of batches and the evaluation of a model."""
    context, loop = teacher.model.config.context, s.loop
    train = [text for path in s.data for text in texts_in(path)]
    val = [text for path in s.val for text in texts_in(path)]
    train, val = (train, val) if val else held_out(train, s.hold)
    source, unseen = Windows(TextCorpus.of(train, teacher.tokenizer), context), TextCorpus.of(val, teacher.tokenizer)
    plan = source.plan(s.batch, loop.seed)

    def loader() -> Loader:
        return Loader(source, plan, PrepareTokens(context), stack_fields, seed=loop.seed, workers=loop.workers,
                      micro=loop.accumulate)  # fmt: skip

    return loader, lambda model: text_scores(model, unseen, context=context, stride=context)


def masked_parts(s: DistillationRun, teacher: Checkpoint) -> tuple[Callable[[], Loader], Figures]:
    """As `causal_parts`; the held-out texts are masked in one fixed way."""
    context, loop, tokenizer = teacher.model.config.context, s.loop, teacher.tokenizer
    train = [document for path in s.data for document in read_documents(path)]
    val = [document for path in s.val for document in read_documents(path)]
    at = int(len(train) * (1 - s.hold))
    train, val = (train, val) if val else (train[:at], train[at:])
    masker, batches = Masker(tokenizer, s.mask), CollateMasked(tokenizer.pad_id, context)
    source, unseen = (
        MaskedTexts(windows(part, tokenizer, context - 2), masker, context, seed=loop.seed) for part in (train, val)
    )
    examples = [unseen.prepare((0, number), generator("held out", number)) for number in range(len(unseen))]
    fixed = [batches(examples[i : i + 32]) for i in range(0, len(examples), 32)]

    def loader() -> Loader:
        return Loader(source, source.plan(s.batch * context), source.prepare, batches, seed=loop.seed,
                      workers=loop.workers, micro=loop.accumulate)  # fmt: skip

    return loader, lambda model: masked_figures(model, fixed)


def trained(s: DistillationRun, name: str, objective: Objective, loader: Loader, figures: Figures) -> TextTransformer:
    loop = replace(s.loop, run=s.loop.run / name)
    return Loop(loop, objective, loader, lambda model, step: figures(model)).fit()


def main(s: DistillationRun) -> dict[str, dict[str, float]]:
    torch.manual_seed(s.loop.seed)
    known = teacher_of(s)
    teacher, causal = known.model, known.model.config.causal
    loader, figures = (causal_parts if causal else masked_parts)(s, known)
    layers = s.layers or teacher.config.stack.layers // 2
    student, config = student_of(teacher, layers), student_config(teacher.config, layers)
    found = {"teacher": figures(teacher), "student before": figures(student.eval())}
    weights = {"soft": s.soft, "task": s.task, "cosine": s.cosine}
    log.info("teacher: %s; student of %d layers", found["teacher"], layers)
    objective = Distillation(student, teacher, s.temperature, weights)
    student = trained(s, "student", objective, loader(), figures)
    found["student"] = figures(student)
    if s.alone:
        fresh = TextTransformer(config)
        gpt2_weights(fresh)
        found["alone"] = figures(
            trained(s, "alone", (Language if causal else MaskedLanguage)(fresh), loader(), figures)
        )
    card = {"teacher": str(s.teacher), "figures": found}
    save_folder(Checkpoint(student, known.tokenizer, card=card), s.out)
    lines = [f"{who}: perplexity {own['perplexity']:.4g}" for who, own in found.items()]
    log.info("%s: %s", s.out, "; ".join(lines))
    write_report(s.loop.run / "student", s, [*s.data, *s.val], lines)
    return found


if __name__ == "__main__":
    start(main)
