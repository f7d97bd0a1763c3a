r"""Distil a text model (Sanh et al. 2019) into a student with half of its layers; a second student learns alone.

    data=data/text
    python recipes/text/distil.py --teacher lm --data $data/tinyshakespeare/input.txt --run distil-run --out lm-small \
        --threads 1

The teacher is a language model, such as train_lm.py writes, or a masked one, such as train_mlm.py writes; its
vocabulary and context are the student's. The report has the perplexity of the teacher, of the student before and after,
and of a student of the same size that trained without teacher or its layers (`run/alone`).

Cost: 25 minutes of a core shared with other work (AMD EPYC), 1.1 GB, including the student alone. Perplexity per
character of train_lm.py's model 4.54, of every second layer of it 6.61, of the student after 600 steps 5.01, of the
student alone after as many 5.98.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from multimodal.data.batching import fixed_batches, stack_fields
from multimodal.data.datasets.documents import documents_in, windows
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, Windows, training_texts
from multimodal.data.loader import Loader
from multimodal.errors import CheckpointError, UsageError, demand
from multimodal.models.text import TextTransformer
from multimodal.system.options import Natural, NonNegativeFloat, Positive, PositiveFloat, ProperShare
from multimodal.tasks.evaluate.perplexity import text_scores
from multimodal.train import Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.objective import Objective
from multimodal.train.objectives.text.distillation import Distillation, student_config, student_of
from multimodal.train.objectives.text.language import Language, gpt2_weights
from multimodal.train.objectives.text.masked import CollateMasked, MaskedLanguage, MaskedTexts, masked_figures
from multimodal.train.objectives.text.masking import Masker, MaskSettings
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load

Figures = Callable[[TextTransformer], dict[str, float]]


@dataclass(frozen=True)
class DistillationRun:
    teacher: str  # text model: a name, folder or file
    data: tuple[Path, ...]  # text files or manifests, plain, gzip or Zstandard
    out: Path  # folder for the student
    val: tuple[Path, ...] = ()  # validation text; without it the last `hold` of the training text
    hold: ProperShare = 0.1
    layers: Natural = 0  # of the student; 0: half of the teacher's
    temperature: PositiveFloat = 2.0
    soft: NonNegativeFloat = 5.0  # weight of the teacher's predictions
    task: NonNegativeFloat = 2.0  # weight of the task itself
    cosine: NonNegativeFloat = 1.0  # weight of the states' direction
    batch: Positive = 16  # rows of the teacher's context
    alone: bool = True  # also train a student without teacher
    mask: MaskSettings = MaskSettings()  # of a masked teacher
    loop: LoopSettings = LoopSettings(
        Path("distil-run"), 600, OptimSettings(2e-3, "muon", warmup=50, weight_decay=0.1, average=0.99),
        evaluate_every=300,
    )  # fmt: skip

    def __post_init__(self):
        demand("task", self.task, self.soft + self.task + self.cosine > 0, "over 0 where the others are 0")


def teacher_of(s: DistillationRun) -> Checkpoint:
    """Load the teacher. Raises CheckpointError or UsageError unless it is a text model that predicts tokens."""
    known = load(s.teacher)
    if not isinstance(known.model, TextTransformer) or known.model.config.tied is None:
        raise UsageError(f"--teacher {s.teacher}: is a {known.kind} that predicts no tokens")
    if known.tokenizer is None:
        raise CheckpointError(f"--teacher {s.teacher}: has no tokenizer")
    return known


def causal_parts(s: DistillationRun, teacher: Checkpoint) -> tuple[Callable[[], Loader], Figures]:
    """Return functions that make the loader and that evaluate a model."""
    context, tokenizer = teacher.model.config.context, teacher.tokenizer
    train, val = (TextCorpus.of(part, tokenizer) for part in training_texts(s.data, s.val, s.hold))
    source = Windows(train, context)
    plan = source.plan(s.batch, s.loop.seed)
    return (
        lambda: s.loop.loader(source, plan, PrepareTokens(context), stack_fields),
        lambda model: text_scores(model, val, context=context, stride=context),
    )


def masked_parts(s: DistillationRun, teacher: Checkpoint) -> tuple[Callable[[], Loader], Figures]:
    """Do the same for a masked model; held-out texts are masked in one fixed way."""
    context, tokenizer = teacher.model.config.context, teacher.tokenizer
    masker, collate = Masker(tokenizer, s.mask), CollateMasked(tokenizer.pad_id, context)
    parts = [windows(documents_in(part), tokenizer, context - 2) for part in (s.data, s.val)]
    if not s.val:
        at = int(len(parts[0]) * (1 - s.hold))
        parts = [parts[0][:at], parts[0][at:]]
    masker.learn(window.ids for window in parts[0])
    source, unseen = (MaskedTexts(part, masker, context, seed=s.loop.seed) for part in parts)
    fixed = fixed_batches(lambda number, random: unseen.prepare((0, number), random), collate, range(len(unseen)))
    return (
        lambda: s.loop.loader(source, source.plan(s.batch * context), source.prepare, collate),
        lambda model: masked_figures(model, fixed),
    )


def trained(
    s: DistillationRun, name: str, objective: Objective, loader: Loader, figures: Figures, teacher: Checkpoint
) -> TextTransformer:  # fmt: skip
    loop = replace(s.loop, run=s.loop.run / name)
    return Loop(loop, objective, loader, lambda model, step: figures(model), teacher).fit()


def main(s: DistillationRun) -> dict[str, dict[str, float]]:
    torch.manual_seed(s.loop.seed)
    known = teacher_of(s)
    teacher, causal = known.model, known.model.config.causal
    loader, figures = (causal_parts if causal else masked_parts)(s, known)
    layers = s.layers or teacher.config.stack.layers // 2
    student, config = student_of(teacher, layers), student_config(teacher.config, layers)
    scores = {"teacher": figures(teacher), "student before": figures(student.eval())}
    weights = {"soft": s.soft, "task": s.task, "cosine": s.cosine}
    log.info("teacher: %s; student of %d layers", scores["teacher"], layers)
    objective = Distillation(student, teacher, s.temperature, weights)
    student = trained(s, "student", objective, loader(), figures, known)
    scores["student"] = figures(student)
    if s.alone:
        fresh = TextTransformer(config)
        gpt2_weights(fresh)
        scores["alone"] = figures(
            trained(s, "alone", (Language if causal else MaskedLanguage)(fresh), loader(), figures, known)
        )
    card = {"teacher": s.teacher, "figures": scores}
    lines = [f"{who}: perplexity {own['perplexity']:.4g}" for who, own in scores.items()]
    checkpoint = Checkpoint(student, known.tokenizer, card=card)
    finish(s, checkpoint, [*s.data, *s.val], lines, figures=scores, run=s.loop.run / "student")
    return scores


if __name__ == "__main__":
    start(main)
