r"""Compare variants of one design choice: train the same small language model with each, and plot the perplexities.

    data=data/text/tinyshakespeare/input.txt
    python recipes/text/study.py --study positions --data $data --run positions-study
    python recipes/text/study.py --study attention --data $data --run attention-study
    python recipes/text/study.py --study depth --data $data --run depth-study
    python recipes/text/study.py --study experts --data $data --run experts-study --width 64 --layers 2 --context 64 \
        --steps 600 --warmup 30 --gated --activation silu --hidden 256

- positions: each kind of positions, on longer texts than in training (Press et al. 2022, figure 1). A rotary model is
  also evaluated with linearly interpolated positions (Chen et al. 2023) and with NTK-aware rates, without further
  training.
- attention: masks (all before, a window, a dilated window, window and global tokens, random blocks), grouped and shared
  keys, and linear attention.
- depth: norms before and after each branch, in shallow and in deep models.
- experts: mixtures of experts, of which two are as large as the feed-forward that they replace (docs/text.md).

4 layers of width 128, texts of 128 characters, 300 steps, 12 minutes of a core shared with other work, 1.5 GB.
Perplexity per character on held-out text of 128, 256, 512 and 1,024 characters:

| positions | 128 | 256 | 512 | 1,024 |
|---|---|---|---|---|
| ALiBi | 6.27 | 6.22 | 6.19 | 6.18 |
| rotary | 7.16 | 7.31 | 8.50 | 10.87 |
| rotary, interpolated linearly | 7.16 | 10.63 | 16.89 | 21.74 |
| rotary, NTK-aware | 7.16 | 7.38 | 8.25 | 10.40 |
| T5's buckets | 8.28 | 8.88 | 10.01 | 11.31 |
| Shaw's | 9.46 | 10.09 | 11.00 | 11.94 |
| learned | 9.64 | | | |
| none | 10.05 | 10.63 | 11.27 | 11.82 |
| sinusoidal | 11.48 | 27.76 | 68.65 | 217.73 |

After so few steps the figures show how soon each learns as much as how far it reaches. With sinusoids and other kinds
of attention, at 128 characters: all before 11.48, a window of 16 10.39, window and 4 global tokens 10.51, random blocks
10.82, half of the key heads 11.24, one 11.12, linear 12.06, every 4th token 12.18. Masks that look near learn sooner.
Norms before and after each branch, width 64, 200 steps (`--width 64 --steps 200 --depths 2 8 16`), 5 minutes: 2 layers
11.36 and 15.47, 8 layers 10.74 and 12.47, 16 layers 10.57 and 12.00.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from multimodal.blocks import masks
from multimodal.data.batching import stack_fields
from multimodal.data.datasets.text import PrepareTokens, TextCorpus, Windows, training_texts
from multimodal.errors import demand
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.system.options import Positive
from multimodal.system.outputs import write_output
from multimodal.tasks.evaluate.perplexity import text_scores
from multimodal.tasks.figures import new_figure, save_figure
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.train import Loop, LoopSettings, OptimSettings, log, start
from multimodal.train.objectives.text.language import Language, LanguageModelSettings, gpt2_weights, language_config

BLOCK = 16  # of the random blocks
Seen = Callable[[int], masks.MaskMod]  # number of positions → mask


class Variant(NamedTuple):
    """`seen` None: causal attention."""

    name: str
    config: TextConfig
    seen: Seen | None = None


@dataclass(frozen=True)
class StudyRun:
    study: Literal["positions", "attention", "depth", "experts"]
    data: tuple[Path, ...]  # text files; characters are the tokens
    batch: Positive = 16
    longer: tuple[int, ...] = (1, 2, 4, 8)  # positions: lengths of text, in contexts
    depths: tuple[int, ...] = (2, 8, 24)  # depth: numbers of layers
    mixtures: tuple[int, ...] = (4, 8)  # experts: numbers of experts, of which a token uses two
    judged: int = 32768  # characters of the last tenth to evaluate on
    model: LanguageModelSettings = LanguageModelSettings(width=128, layers=4, context=128)
    loop: LoopSettings = LoopSettings(
        Path("study-run"), 300, OptimSettings(3e-3, "muon", warmup=50, weight_decay=0.1, average=0.99),
        evaluate_every=10**6, save_every=300, log_every=100,
    )  # fmt: skip

    def __post_init__(self):
        demand("longer", self.longer, all(n >= 1 for n in self.longer), "1 or more each")
        demand("depths", self.depths, all(n >= 1 for n in self.depths), "1 or more each")
        demand("mixtures", self.mixtures, all(n >= 2 for n in self.mixtures), "2 or more each")
        demand("judged", self.judged, self.judged > max(self.longer) * self.model.context, "more than the longest text")


class PartialMaskModel(TextTransformer):
    """A causal model whose mask is `seen`."""

    def __init__(self, config: TextConfig, seen: Seen):
        super().__init__(config)
        self.seen = seen

    def states(self, ids: Tensor, *parts: Any, mask: Tensor | None = None, **other: Any) -> Tensor:
        size = ids.shape[1]
        mask = masks.dense(self.seen(size), size, size, ids.device) if mask is None else mask
        return super().states(ids, *parts, mask=mask, **other)


def variants(s: StudyRun, vocabulary: int) -> Iterator[Variant]:
    of = lambda **change: language_config(replace(s.model, **change), vocabulary)
    if s.study == "positions":
        for kind in ("learned", "sinusoidal", "shaw", "bucket", "rotary", "alibi", "none"):
            yield Variant(kind, of(positions=kind))
    elif s.study == "depth":
        for layers in s.depths:
            for post in (False, True):
                yield Variant(f"{'post' if post else 'pre'}-norm, {layers}", of(layers=layers, post_norm=post))
    elif s.study == "experts":
        hidden = s.model.hidden or 4 * s.model.width
        yield Variant("one feed-forward", of(hidden=hidden))
        for count in s.mixtures:
            yield Variant(f"2 of {count} experts", of(hidden=hidden // 2, experts=count, experts_per_token=2))
    else:
        yield from _attentions(of, s.model.heads)


def _attentions(of: Callable[..., TextConfig], heads: int) -> Iterator[Variant]:
    whole = of(positions="sinusoidal")  # which linear attention takes too
    inner = lambda size: max(4, size // 8)
    past = lambda *rules: masks.all_of(masks.before, masks.any_of(*rules))
    dice = lambda: torch.Generator().manual_seed(0)
    yield Variant("all before", whole)
    yield Variant("window of 1/8", whole, lambda size: masks.near(inner(size)))
    yield Variant("dilated, every 4th", whole, lambda size: masks.strided(4, inner(size)))
    yield Variant("window and 4 global", whole, lambda size: past(masks.near(inner(size)), masks.first(4)))
    yield Variant(
        "2 random blocks", whole, lambda size: past(masks.random_blocks(size, BLOCK, 2, dice()), masks.near(BLOCK))
    )
    for kv_heads in (heads // 2, 1):
        yield Variant(f"{kv_heads} of {heads} key heads", of(positions="sinusoidal", kv_heads=kv_heads))
    block = whole.stack.block
    block = replace(block, attention=replace(block.attention, linear="causal"))
    yield Variant("linear", replace(whole, stack=replace(whole.stack, block=block)))


def trained(s: StudyRun, variant: Variant, corpus: TextCorpus) -> nn.Module:
    torch.manual_seed(s.loop.seed)
    config, context = variant.config, s.model.context
    model = PartialMaskModel(config, variant.seen) if variant.seen else TextTransformer(config)
    gpt2_weights(model)
    loop = replace(s.loop, run=s.loop.run / variant.name.replace(" ", "-").replace("/", "-"))
    source = Windows(corpus, context)
    loader = loop.loader(source, source.plan(s.batch, loop.seed), PrepareTokens(context), stack_fields)
    return Loop(loop, Language(model), loader).fit()


def judged(s: StudyRun, model: TextTransformer, unseen: TextCorpus) -> dict[str, dict[int, float]]:
    """Perplexity per character by length of text; names other than "" are those of changed positions."""
    context, config = s.model.context, model.config
    score = lambda length: text_scores(model, unseen, context=length, stride=length)["perplexity"]
    lengths = [n * context for n in (s.longer if s.study == "positions" else (1,))]
    results = {"": {length: score(length) for length in lengths if config.limit is None or length <= config.limit}}
    if s.study == "positions" and config.positions.kind == "rotary":
        for name in ("linear", "ntk"):
            results[name] = {}
            for length in lengths:
                stretch = length / context
                change = {"scale": 1 / stretch} if name == "linear" else {"ntk": stretch}
                model.config = replace(config, positions=replace(config.positions, **change))
                results[name][length] = score(length)
        model.config = config
    return results


def draw(s: StudyRun, results: dict[str, dict[int, float]], path: Path) -> None:
    figure = new_figure((8, 5), dpi=120)
    axes = figure.subplots()
    if s.study == "positions":
        for name, row in results.items():
            axes.plot(list(row), list(row.values()), marker="o", label=name)
        axes.axvline(s.model.context, color="grey", linestyle=":", label="trained length")
        axes.set(xscale="log", yscale="log", xlabel="characters of text", ylabel="perplexity a character")
        axes.set_xticks(sorted({length for row in results.values() for length in row}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.legend(fontsize=8)
    else:
        names = list(results)[::-1]
        bars = axes.barh(names, [next(iter(results[name].values())) for name in names])
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.set(xlabel="perplexity a character", xlim=(1, None))
        axes.margins(x=0.1)
    save_figure(figure, path, CAPTIONS[s.study])


CAPTIONS = {
    "positions": "Held-out text of several lengths. Right of the dotted line texts are longer than in training: curves "
    "that stay flat there extrapolate.",
    "attention": "Shorter is better. The first bar sees all before it; the others see less, or share keys.",
    "depth": "Shorter is better. Compare norms before and after each branch at the same number of layers.",
    "experts": "Shorter is better. All take as many operations a token; compare by number of parameters.",
}


def main(s: StudyRun) -> None:
    train, val = training_texts(s.data, (), 0.1)
    tokenizer = CharacterTokenizer.train([*train, *val])
    corpus, unseen = TextCorpus.of(train, tokenizer), TextCorpus.of(["".join(val)[: s.judged]], tokenizer)
    results: dict[str, dict[int, float]] = {}
    s.loop.run.mkdir(parents=True, exist_ok=True)
    for variant in variants(s, tokenizer.vocab_size):
        model = trained(s, variant, corpus)
        size = f", {sum(p.numel() for p in model.parameters()):,} parameters" if s.study == "experts" else ""
        for name, row in judged(s, model, unseen).items():
            results[f"{variant.name}, {name}" if name else variant.name + size] = row
        log.info("%s: %s", variant.name, " ".join(f"{length}: {value:.2f}" for length, value in row.items()))
        write_output(s.loop.run / "study.json", (json.dumps(results, indent=1) + "\n").encode())
        draw(s, results, s.loop.run / "study")
    for name, row in results.items():
        print(f"{name:<36}", *(f"{value:10.3f}" for value in row.values()))


if __name__ == "__main__":
    start(main)
