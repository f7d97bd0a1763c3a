"""Language models: the objective of causal and prefix LM, and what a text costs a model."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.masks import causal, documents, window
from multimodal.data.datasets.text import IGNORED, Batch, Corpus
from multimodal.errors import DataError
from multimodal.models.text import TextTransformer
from multimodal.train.losses import vocabulary_loss
from multimodal.train.objective import Summed


def mask_of(batch: Batch, seeing: int | None = None) -> Bool[Tensor, "_ 1 T T"] | None:
    """What sees what: what came before, the prefix too (Raffel et al. 2020, figure 4), in the own document alone, and
    of all that the last `seeing` tokens where the model has such a window. None: what the model does by itself."""
    if batch.documents is None and batch.given is None:
        return None
    size, device = batch.ids.shape[1], batch.ids.device
    seen = causal(size, size, device)[None, None]
    if batch.given is not None:
        seen = seen | batch.given[:, None, None]
    if seeing is not None:
        seen = seen & window(size, size, seeing - 1, size, device)
    return seen if batch.documents is None else seen & documents(batch.documents)


def projection(
    model: TextTransformer, states: Float[Tensor, "N D"]
) -> tuple[Float[Tensor, "N E"], Float[Tensor, "V E"], Float[Tensor, "V"] | None]:
    """The linear map that `model.logits(states)` ends with: what it is of, its weight and bias."""
    states = states if model.transform is None else model.transform(states[None])[0]
    if model.head is not None:
        return states, model.head.weight, model.head.bias
    return states * model.config.logit_scale, model.embed.weight, model.tied_bias


def guesses_loss(model: TextTransformer, batch: Batch, chunk: int = 4096) -> Float[Tensor, ""]:
    """The summed cross-entropy of all targets, without all logits at once."""
    states = model.states(batch.ids, mask=mask_of(batch, model.config.window), places=batch.places)
    states, targets = states.flatten(0, 1), batch.targets.flatten()
    if states.device.type == "cpu" and not (guessed := targets != IGNORED).all():  # a GPU would wait for their number
        states, targets = states[guessed], targets[guessed]
    return vocabulary_loss(*projection(model, states), targets, chunk)


class Language(Summed):
    """Cross-entropy of the next tokens, each weighing the same."""

    def __init__(self, model: TextTransformer, chunk: int = 4096):
        super().__init__(model)
        self.chunk = chunk

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": guesses_loss(self.model, batch, self.chunk)}

    def counts(self, batch: Batch) -> dict[str, int | Tensor]:
        return {"loss": (batch.targets != IGNORED).sum()}


def windows(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first): the ids start..end-1 are read, of which those from `first` on tell the token after them.
    Each token of a text of `length` but the first is told once, with up to `context` ids before it, of which, but at
    the start of the text, at least `context - stride + 1`."""
    found, told = [], 0
    while told < length - 1:
        end = min(told + (stride if told else context), length - 1)
        found.append((max(0, end - context), end, told))
        told = end
    return found


@torch.inference_mode()
def text_losses(
    model: TextTransformer, corpus: Corpus, context: int, stride: int, batch: int = 16, prefix: bool = False
) -> tuple[float, int]:
    """The summed cross-entropy (nats) of all tokens but the first of each text, and how many they are. `prefix`: the
    ids of a window before those that tell something are seen by all of it."""
    rows = [(n, *window) for n in range(len(corpus)) for window in windows(len(corpus.text(n)), context, stride)]
    rows.sort(key=lambda row: row[1] - row[2])  # rows of a batch are about as long as each other
    total, count, device = 0.0, 0, model.device
    for at in range(0, len(rows), batch):
        part = _padded(corpus, rows[at : at + batch], prefix)
        total += guesses_loss(model, Batch(*(None if x is None else x.to(device) for x in part))).item()
        count += int((part.targets != IGNORED).sum())
    return total, count


def _padded(corpus: Corpus, rows: list[tuple[int, int, int, int]], prefix: bool) -> Batch:
    """Rows padded on the right, which what is before does not see."""
    size = max(end - start for _, start, end, _ in rows)
    ids, targets = torch.zeros(len(rows), size, dtype=torch.long), torch.full((len(rows), size), IGNORED)
    given = torch.zeros(len(rows), size, dtype=torch.bool)
    for row, (number, start, end, first) in enumerate(rows):
        text = corpus.text(number)
        ids[row, : end - start] = text[start:end]
        targets[row, first - start : end - start] = text[first + 1 : end + 1]
        given[row, : first - start + 1] = True
    return Batch(ids, targets, given=given if prefix else None)


def text_scores(model: TextTransformer, corpus: Corpus, **options) -> dict[str, float]:
    """What `text_losses` finds, as nats a token (the tokens that end texts among them), perplexity of it, nats a
    character and bits a byte of the text."""
    total, count = text_losses(model, corpus, **options)
    return {
        "loss": total / count, "perplexity": math.exp(min(total / count, 700.0)),
        "nats_per_character": total / corpus.characters, "bits_per_byte": total / math.log(2) / corpus.bytes,
    }  # fmt: skip


@torch.inference_mode()
def losses_by_place(model: TextTransformer, corpus: Corpus, context: int, batch: int = 16) -> Float[Tensor, "T"]:
    """Mean nats of the token after each place of a window, over whole windows side by side. Raises DataError where the
    text does not fill one."""
    starts, device = range(0, len(corpus.ids) - context, context), model.device
    if not starts:
        raise DataError(f"{len(corpus.ids)} tokens of validation text do not fill a --context {context}")
    total = torch.zeros(context, device=device)
    for at in range(0, len(starts), batch):
        rows = torch.stack([corpus.ids[i : i + context + 1].long() for i in starts[at : at + batch]]).to(device)
        logits = model.logits(model.states(rows[:, :-1])).float()
        total += F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").sum(0)
    return (total / len(starts)).cpu()


@torch.no_grad()
def gpt2_weights(model: TextTransformer, std: float = 0.02) -> None:
    """Draws new weights as GPT-2 (Radford et al. 2019, section 2.3; openai/gpt-2): matrices and embeddings from
    N(0, std²), the projections that end residual branches from N(0, std²/(2·layers)), biases 0. Norms stay."""
    layers = model.config.stack.layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".attention.out", ".feed.down"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * layers) if last else std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
    if model.positions is not None:
        nn.init.normal_(model.positions, std=std / 2)
