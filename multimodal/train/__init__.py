"""Training: the loop, its settings and crash-safe states, owned by the recipes that use them.

A recipe imports from here what every recipe needs."""

from multimodal.train.checkpoint.best import KeepBest
from multimodal.train.loop import Loop
from multimodal.train.metrics.report import finish
from multimodal.train.optim import OptimSettings
from multimodal.train.recipe_cli import log, start
from multimodal.train.settings import LoopSettings

__all__ = ["KeepBest", "Loop", "LoopSettings", "OptimSettings", "finish", "log", "start"]
