r"""Train a language model: causal, or with a prefix that all tokens see (Raffel et al. 2020, figure 4).

    data=data/text
    python recipes/text/train_lm.py --data $data/tinyshakespeare/input.txt --layers 4 --dropout 0.15 --steps 1300 \
        --warmup 100 --average 0.995 --evaluate_every 600 --run lm-run --out lm --threads 1
    multimodal generate --model lm --prompt "ROMEO:" --temperature 0.8

Text is one stream by default, read in windows. With `--documents lines` or `blank` each line or paragraph is its own
text; several share a row without seeing each other. `--objective prefix` makes a random first part a prefix.

Cost of the command: about 18 minutes of one core (AMD EPYC with AVX-512 bf16, shared with other work), 1.4 GB; 3.18 M
parameters. Result on the last 10 % of the characters, nanoGPT's split, in windows of 256 characters side by side: 1.512
nats per character (nanoGPT's README: 1.88 with its settings for a CPU, 1.47 with those for a GPU). That run started
with `--steps 2700` and resumed after step 611 with `--resume --steps 1300`; an unbroken run has not been measured.

The shipped gpt-mini, 1.57 bits per byte of its validation texts after 9 minutes of a core with bfloat16. WikiText-2
writes rare words as <unk>: only the three in ten sentences without one are used, with usual spaces.

    zcat $data/wikitext2/{valid,test}.txt.gz | sed -E 's/ @(.)@ /\1/g; s/ \. /.\n/g; s/ ([.,;:!?)%])/\1/g
        s/\( /(/g' | grep -vE '<unk>|^ *$|^ = ' | sed 's/^ //' > wiki.txt
    head -n 4986 wiki.txt > wiki.train.txt; tail -n 471 wiki.txt > wiki.val.txt
    python recipes/text/train_lm.py --data $data/multi30k/train.en.gz $data/tinyshakespeare/input.txt wiki.train.txt \
        --val $data/multi30k/val.en.gz wiki.val.txt --tokenizer bpe --vocabulary 4096 --layers 4 --width 192 \
        --dropout 0.15 --steps 900 --warmup 50 --average 0.99 --evaluate_every 200 --run lm-run --out gpt-mini \
        --threads 1

The shipped asr-lm-en, for the beams of asr-conformer-en: perplexity 7.1 on the transcripts of `--val` after 14 minutes
of a core (`s1` to `s4`: the manifests of train_asr.py's docstring, of which it reads the texts):

    python recipes/text/train_lm.py --plain --data $speech/speechocean762/train.jsonl $speech/an4/train.jsonl \
        $speech/fsdd/train.jsonl speech/s1.jsonl speech/s2.jsonl speech/s3.jsonl speech/s4.jsonl \
        $data/multi30k/train.en.gz --epochs 14 30 2 1 1 1 1 0.25 --val $speech/speechocean762/valid.jsonl \
        --documents lines --tokenizer asr-conformer-en --layers 4 --width 64 --heads 4 --context 128 --dropout 0.05 \
        --batch 24 --steps 4000 --warmup 100 --average 0.998 --run lm-run --out asr-lm-en --threads 1

Several files of --data are one text after the other. With weights each is a source of its own, and rows are drawn as in
GPT-3's training (Brown et al. 2020, table 2.2): by `--weights 0.6 0.4`, by `--epochs 1 3` of each file, or by
`--temperature 5`, the sizes to the power of 1/5. Log and report have the weights and epochs.

`--induction` scores the heads at each evaluation and plots when induction heads form (Olsson et al. 2022):

    python recipes/text/train_lm.py --data $data/tinyshakespeare/input.txt --hold 0.01 --tokenizer bpe \
        --vocabulary 512 --layers 2 --width 64 --context 64 --repeat 0.5 --induction --batch 32 --steps 1600 \
        --rate 5e-3 --schedule wsd --evaluate_every 100 --run induction-run --out induction --threads 1

Cost: under 7 minutes of a core shared with other work, 0.9 GB. Two heads of the second layer go from prefix-matching
scores of 0.04 and 0.03 at step 500 to 0.48 and 0.44 at step 900 (`report/induction.png`). Meanwhile the second copy
of a random sequence becomes cheaper than the first by 0.4, then by 3.9 nats per token.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from multimodal.blocks.cache import Cache
from multimodal.data.batching import stack_fields
from multimodal.data.datasets.speech import plain
from multimodal.data.datasets.text import (
    Packed,
    PrepareTokens,
    Split,
    TextCorpus,
    Windows,
    ends_of,
    training_texts,
)
from multimodal.data.mixture import Mixture, mixture_weights, temperature_weights
from multimodal.decoding.sampling import sample
from multimodal.errors import UsageError, demand
from multimodal.models.conformer import ConformerCTC
from multimodal.models.speech.transducer import Transducer
from multimodal.models.text import TextTransformer
from multimodal.system.assets import model_path
from multimodal.system.options import Natural, NonNegativeFloat, Positive, ProperShare, Share, Temperature
from multimodal.tasks.evaluate.perplexity import text_scores
from multimodal.tasks.transcribe.conformer.decode import search_tokenizer
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.train import KeepBest, Loop, LoopSettings, OptimSettings, finish, log, start
from multimodal.train.objectives.text.induction_curve import InductionCurve
from multimodal.train.objectives.text.language import Language, LanguageModelSettings, gpt2_weights, language_config
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


@dataclass(frozen=True)
class LanguageModelRun:
    data: tuple[Path, ...]  # text files, or manifests (.jsonl, .csv, .tsv), whose texts are documents; .gz and .zst too
    out: Path  # folder for the checkpoint with the lowest validation loss
    weights: tuple[float, ...] = ()  # share of the rows for each file of --data
    epochs: tuple[float, ...] = ()  # the same as epochs of each file, in proportion to each other
    temperature: Temperature = 0.0  # the same by size^(1/temperature); 0: off
    val: tuple[Path, ...] = ()  # validation text; without it the last `hold` of the training text
    hold: ProperShare = 0.1
    documents: Split = "none"  # split the text into documents: lines, or at blank lines
    plain: bool = False  # as train_ngram.py's, for a recognizer's beams: lower case, no punctuation but the apostrophe
    tokenizer: str = "characters"  # characters, bytes, bpe (learned here), gpt2, a checkpoint folder or shipped model
    vocabulary: Positive = 2048  # of bpe
    objective: Literal["causal", "prefix"] = "causal"
    repeat: Share = 0.0  # share of the rows that repeat their first tokens
    balance: NonNegativeFloat = 0.01  # weight of the load-balancing loss of a mixture of experts
    induction: bool = False  # score induction heads at each evaluation, and plot when they form
    batch: Positive = 16  # rows of `context` tokens
    stride: Natural = 0  # tokens between windows of validation text (0: the context; for a prefix half of it)
    prompt: str | None = None  # of the samples in the report; by default the first character of the data
    samples: Positive = 3
    sample_tokens: Positive = 200  # of each sample, at most
    model: LanguageModelSettings = LanguageModelSettings()
    loop: LoopSettings = LoopSettings(
        Path("lm-run"), 2000, OptimSettings(3e-3, "muon", warmup=50, weight_decay=0.1, average=0.99), evaluate_every=500
    )

    def __post_init__(self):
        given = [name for name in ("weights", "epochs", "temperature") if getattr(self, name)]
        if len(given) > 1:
            raise UsageError(f"cannot be given with {given[0]}", argument=given[1])
        for name in ("weights", "epochs"):
            count = len(getattr(self, name))
            demand(name, getattr(self, name), count in (0, len(self.data)), f"one for each of {len(self.data)} --data")
            if count:
                mixture_weights(getattr(self, name), name)
        demand("induction", self.induction, not self.induction or self.objective == "causal", "off with a prefix")
        demand("stride", self.stride, self.stride <= self.model.context, f"at most the context ({self.model.context})")

    @property
    def mixed(self) -> bool:
        """Each file is a source of its own."""
        return bool(self.weights or self.epochs or self.temperature)


def transcripts(texts: list[str]) -> list[str]:
    """Plain texts, each after a space: a recognizer's first word has the tokens of one inside of a sentence."""
    return [f" {words}" for text in texts if (words := plain(text))]


def tokenizer_of(s: LanguageModelRun, train: list[str], val: list[str]) -> Tokenizer:
    if s.tokenizer == "characters":  # of validation too: text with unknown characters has no probability
        return CharacterTokenizer.train([*train, *val])
    if s.tokenizer == "bpe":
        return BytePairTokenizer.train(train, s.vocabulary)
    if s.plain and (model_path(s.tokenizer) / "config.json").exists():
        recognizer = load(s.tokenizer)
        if isinstance(recognizer.model, ConformerCTC | Transducer):
            return search_tokenizer(recognizer)
    return tokenizer_from(s.tokenizer)


def validation(s: LanguageModelRun, tokenizer: Tokenizer, val: TextCorpus, model: TextTransformer) -> KeepBest:
    """Evaluation on the whole validation text that keeps the checkpoint with the lowest loss."""
    context, prefix = s.model.context, s.objective == "prefix"
    stride = s.stride or (context // 2 if prefix else context)
    start_from = Checkpoint(model, tokenizer, card={"objective": s.objective})
    return KeepBest(
        s.loop, lambda net: text_scores(net, val, context=context, stride=stride, prefix=prefix),
        lambda scores: -scores["loss"], start_from, {"stride": stride},
    )  # fmt: skip


def prompt_ids(s: LanguageModelRun, tokenizer: Tokenizer) -> list[int]:
    """Encode the prompt. Raises UsageError if the context leaves no room after it, TextError for unknown characters."""
    ids = [ends_of(tokenizer)[0], *tokenizer.encode(s.prompt)]
    if len(ids) >= s.model.context:
        raise UsageError(f"--prompt: has {len(ids)} tokens, which leave no room in a --context {s.model.context}")
    return ids


@torch.inference_mode()
def samples(s: LanguageModelRun, model: TextTransformer, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Continue the prompt up to the end of the context."""
    prefix, room = s.objective == "prefix", s.model.context - len(ids)

    def step(new: torch.Tensor, cache: Cache) -> torch.Tensor:
        count = new.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool) if prefix and count > 1 else None  # prefix: the prompt
        return model.logits(model.states(new, cache=cache, mask=seen)[:, -1:])

    drawn = sample(step, torch.tensor([ids]), model.new_cache(), eos=ends_of(tokenizer)[1], temperature=0.8,
                   max_new=min(s.sample_tokens, room), generators=[torch.Generator().manual_seed(0)],
                   copies=s.samples)  # fmt: skip
    return [f"temperature 0.8: {s.prompt}{tokenizer.decode(row)}" for row in drawn.ids]


def source_of(s: LanguageModelRun, texts: list[list[str]], tokenizer: Tokenizer) -> Packed | Windows | Mixture:
    """Rows of all texts, or a mixture of those of each file."""
    kind = Packed if s.documents != "none" else Windows
    corpora = [TextCorpus.of(part, tokenizer) for part in texts]
    tokens = [len(corpus.ids) for corpus in corpora]
    log.info("%d texts, %d tokens of %d kinds", sum(map(len, corpora)), sum(tokens), tokenizer.vocab_size)
    sources = [kind(corpus, s.model.context) for corpus in corpora]
    if not s.mixed:
        return sources[0]
    by_epochs = [n * epochs for n, epochs in zip(tokens, s.epochs, strict=False)]
    weights = s.weights or by_epochs or temperature_weights(tokens, s.temperature)
    return Mixture(sources, weights, [path.name for path in s.data])


def main(s: LanguageModelRun) -> None:
    loop = s.loop
    torch.manual_seed(loop.seed)
    groups = [(path,) for path in s.data] if s.mixed else [s.data]
    parts = [training_texts(paths, s.val, s.hold, s.documents) for paths in groups]
    if s.plain:
        parts = [(transcripts(own), transcripts(held)) for own, held in parts]
    train = [text for own, _ in parts for text in own]
    val = parts[0][1] if s.val else [text for _, held in parts for text in held]
    s = s if s.prompt is not None else replace(s, prompt=next(iter(train), "")[:1])
    tokenizer = tokenizer_of(s, train, val)
    prompt = prompt_ids(s, tokenizer)
    unseen = TextCorpus.of(val, tokenizer)
    model = TextTransformer(language_config(s.model, tokenizer.vocab_size))
    gpt2_weights(model)
    source = source_of(s, [own for own, _ in parts], tokenizer)
    rows = source.table(loop.steps * s.batch) if isinstance(source, Mixture) else []
    shares = ["{}: {} rows, weight {:.3f}, {:.2f} epochs".format(*row) for row in rows]
    for line in shares:
        log.info(line)
    prepare = PrepareTokens(s.model.context, s.objective == "prefix", s.documents != "none", s.repeat)
    loader = loop.loader(source, source.plan(s.batch, loop.seed), prepare, stack_fields)
    judge = validation(s, tokenizer, unseen, model)
    heads = InductionCurve(loop.run, tokenizer, unseen, s.model.context) if s.induction else None

    def evaluate(net: nn.Module, step: int) -> dict[str, float]:
        return judge(net, step) | (heads(net, step) if heads else {})

    Loop(loop, Language(model, balance=s.balance), loader, evaluate, judge.start).fit()
    best = judge.load()
    lines, images = [*shares, *samples(s, best.model, tokenizer, prompt)], []
    if heads:
        lines += heads.plot(loop.run / "report" / "induction.png")
        images = ["induction.png"]
    finish(s, best, [*s.data, *s.val], lines, images=images)


if __name__ == "__main__":
    start(main)
