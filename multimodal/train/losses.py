"""Losses: contrastive, CTC, tokens, replaced tokens, and cross-entropy over a vocabulary in chunks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.data.datasets.text import IGNORED

PIECE = 2**20  # logits of a CPU's softmax at a time


class SingleProcess:
    """Exchange of texts between processes, for a single process."""

    def sweep(self, work: Callable, merge: Callable, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the merged results of all processes for the texts of this one. `work(*texts)` returns tensors with a
        row for each text; `merge(mine, other)` combines the results of two processes for the same texts."""
        return work(*texts)

    def total(self, value: Tensor) -> Tensor:
        """Sum over all processes."""
        return value


def contrastive_loss(
    images: Float[Tensor, "B D"], texts: Float[Tensor, "C D"], scale: Float[Tensor, ""],
    bias: Float[Tensor, ""] | None = None, *, concepts: Int[Tensor, "B"] | None = None,
    terms: Int[Tensor, "C"] | None = None, fits: Callable[[Tensor, Tensor], Tensor] | None = None,
    sigmoid: bool = False, across: SingleProcess | None = None, block: int = 2**24,
) -> Float[Tensor, ""]:  # fmt: skip
    """Contrastive loss of the logits `scale * images @ texts.T + bias`, of which at most `block` exist at a time.

    Cross-entropy of images over texts and of texts over images (Radford et al. 2021, figure 3), with targets spread
    evenly over all matches (UniCL, Yang et al. 2022). An image or text without a match is a negative only. `sigmoid`:
    instead each pair is a binary classification (Zhai et al. 2023, equation 1), summed and divided by the number of
    images. `fits(concepts, terms)` [b c] is True for matching pairs; by default, for equal numbers, and by default the
    rows are numbered in order.

    With several processes, their results sum to the loss of all images and texts, and each gets the gradient of that
    sum for its own features and for its own copy of scale and bias."""
    if concepts is None or terms is None:
        concepts, terms = (torch.arange(len(x), device=x.device) for x in (images, texts))
    fits = fits or (lambda concepts, terms: concepts[:, None] == terms)
    formula = _sigmoid if sigmoid else _softmax
    return _Contrast.apply(images, texts, scale, bias, concepts, terms, fits, formula, across or SingleProcess(), block)


class _Contrast(torch.autograd.Function):
    """Computes the gradient together with the loss, so that no logits are kept."""

    @staticmethod
    def forward(ctx, images, texts, scale, bias, concepts, terms, fits, formula, across, block):
        size = max(1, block // max(1, len(texts)))
        rows = [slice(i, i + size) for i in range(0, len(images), size)]
        images_grad, scalars = torch.zeros_like(images), images.new_zeros(2)

        def logits(part: slice, texts: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
            scores = scale * images[part] @ texts.T
            return scores if bias is None else scores + bias, fits(concepts[part], terms)

        def pull(part: slice, texts: Tensor, gradient: Tensor) -> Tensor:
            """Add the gradients of images, scale and bias; return that of the texts."""
            towards = gradient @ texts
            images_grad[part] += scale * towards
            scalars[0] += (towards * images[part]).sum()
            scalars[1] += gradient.sum()
            return scale * gradient.T @ images[part]

        loss, texts_grad = formula(logits, pull, rows, len(images), texts, terms, across)
        ctx.save_for_backward(images_grad, texts_grad, scalars[0], None if bias is None else scalars[1])
        return loss

    @staticmethod
    def backward(ctx, gradient):
        return *(None if x is None else gradient * x for x in ctx.saved_tensors), *[None] * 6


def _sigmoid(logits: Callable, pull: Callable, rows: list[slice], count: int, texts, terms, across: SingleProcess):
    images, loss = across.total(texts.new_full((), count)), texts.new_zeros(())

    def work(texts: Tensor, terms: Tensor) -> list[Tensor]:
        grad = torch.zeros_like(texts)
        for part in rows:
            scores, same = logits(part, texts, terms)
            sign = same.to(scores.dtype) * 2 - 1
            loss.sub_(F.logsigmoid(sign * scores).sum() / images)
            grad += pull(part, texts, -sign * (-sign * scores).sigmoid() / images)
        return [grad]

    (texts_grad,) = across.sweep(work, lambda mine, other: [mine[0] + other[0]], [texts, terms])
    return loss, texts_grad


def _softmax(logits: Callable, pull: Callable, rows: list[slice], count: int, texts, terms, across: SingleProcess):
    """Two rounds: sums over rows and columns, then loss and gradient. `sum`: logsumexp of a row or column; `fitting`:
    its number of matches."""
    row_sum, row_fitting = texts.new_full((count,), -torch.inf), texts.new_zeros(count)

    def look(texts: Tensor, terms: Tensor) -> list[Tensor]:
        column_sum, column_fitting = texts.new_full((len(texts),), -torch.inf), texts.new_zeros(len(texts))
        for part in rows:
            scores, same = logits(part, texts, terms)
            row_sum[part] = row_sum[part].logaddexp(scores.logsumexp(1))
            row_fitting[part] += same.sum(1)
            column_sum, column_fitting = column_sum.logaddexp(scores.logsumexp(0)), column_fitting + same.sum(0)
        return [column_sum, column_fitting]

    columns = across.sweep(look, lambda mine, other: [mine[0].logaddexp(other[0]), mine[1] + other[1]], [texts, terms])
    images, captions = (across.total((n > 0).sum().to(texts)).clamp(min=1) for n in (row_fitting, columns[1]))
    loss = texts.new_zeros(())

    def work(texts: Tensor, terms: Tensor, column_sum: Tensor, column_fitting: Tensor) -> list[Tensor]:
        grad = torch.zeros_like(texts)
        for part in rows:
            scores, same = logits(part, texts, terms)
            gradient = torch.zeros_like(scores)
            sums = (row_sum[part, None], row_fitting[part, None], images), (column_sum, column_fitting, captions)
            for total, fitting, number in sums:
                scored, target = scores - total, same / fitting.clamp(min=1)
                loss.sub_((scored * target).sum() / number / 2)
                gradient += (scored.exp() * (fitting > 0) - target) / number / 2
            grad += pull(part, texts, gradient)
        return [grad]

    (texts_grad,) = across.sweep(work, lambda mine, other: [mine[0] + other[0]], [texts, terms, *columns])
    return loss, texts_grad


def ctc_loss(
    logits: Float[Tensor, "B T W"], lengths: Sequence[int], targets: Int[Tensor, "B L"],
    target_lengths: Sequence[int], blank: int,
) -> Float[Tensor, "B"]:  # fmt: skip
    """CTC loss of each row (Graves et al. 2006). A target longer than its row counts 0.

    Lengths are numbers of the host, which would wait for those on a GPU; as tensors of the host they fail beside
    logits on a GPU while FLOPs are counted (torch 2.11)."""
    return F.ctc_loss(
        logits.float().log_softmax(-1).transpose(0, 1), targets, tuple(lengths), tuple(target_lengths), blank,
        reduction="none", zero_infinity=True,
    )  # fmt: skip


def selected(real: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"], *others: Tensor) -> tuple[Tensor, ...]:
    """Targets [N], and rows of the other tensors, at real tokens. On a GPU, where the host would wait for their number,
    all of them, with IGNORED as the target of tokens that are not real."""
    if targets.device.type == "cpu":
        return targets[real], *(one[real] for one in others)
    return torch.where(real, targets, IGNORED).flatten(), *(one.flatten(0, 1) for one in others)


def token_loss(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"], smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Summed cross-entropy of the valid tokens."""
    wanted, chosen = selected(valid, targets, logits)
    return F.cross_entropy(chosen.float(), wanted, label_smoothing=smoothing, reduction="sum")


def detection_loss(
    logits: Float[Tensor, "B T"], replaced: Bool[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """ELECTRA's replaced token detection: summed binary cross-entropy of the valid tokens (Clark et al. 2020, section
    2)."""
    return F.binary_cross_entropy_with_logits(logits.float(), replaced.float(), valid.float(), reduction="sum")


def vocabulary_loss(
    states: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, "V"] | None,
    targets: Int[Tensor, "N"], chunk: int = 4096, smoothing: float = 0.0, cap: float | None = None,
) -> Float[Tensor, ""]:  # fmt: skip
    """Summed cross-entropy of the logits l = `states @ weight.T + bias`, of `chunk` states at a time. Negative targets
    are ignored. `smoothing`: label smoothing (Szegedy et al. 2016). `cap` c: the logits are c·tanh(l/c). Under autocast
    the products use its type; softmax and loss always use float32 or better."""
    kind = states.device.type
    product = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    learns = torch.is_grad_enabled() and not _forward_only
    return _Vocabulary.apply(states, weight, bias, targets, chunk, product, learns, smoothing, cap)


_forward_only = False


@contextlib.contextmanager
def forward_only() -> Iterator[None]:
    """Compute no gradients in the forward of `vocabulary_loss`, so that the FLOPs of a forward alone can be counted."""
    global _forward_only
    _forward_only = True
    try:
        yield
    finally:
        _forward_only = False


def loss_and_pull(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"], wide: torch.dtype, smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], Float[Tensor, "N V"]]:
    """Summed cross-entropy and its gradient at the logits, written so that a compiler fuses it into two passes."""
    known, scores = (targets >= 0).to(wide), logits.to(wide)
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    wanted = hit.to(wide) * (1 - smoothing) + smoothing / logits.shape[1]
    total = scores.logsumexp(1)
    loss = ((total - (wanted * scores).sum(1)) * known).sum()
    return loss, (((scores - total[:, None]).exp() - wanted) * known[:, None]).to(logits.dtype)


_compiled: Callable[..., tuple[Tensor, Tensor]] | None = None


def compile_loss() -> None:
    """Compile the loss over a vocabulary for GPUs."""
    global _compiled
    _compiled = _compiled or torch.compile(loss_and_pull)


class _Vocabulary(torch.autograd.Function):
    """Computes the gradient together with the loss, so that no logits are kept."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, chunk, product, learns, smoothing, cap):
        wide, compiled = torch.promote_types(product, torch.float32), _compiled
        ready, loss = weight.to(product), states.new_zeros((), dtype=wide)
        learns = learns and any(ctx.needs_input_grad)
        grads = [torch.empty_like(states), None, None if bias is None else torch.zeros_like(bias, dtype=wide)]
        for begin in range(0, len(states), chunk):
            part = slice(begin, begin + chunk)
            own = states[part].to(product)
            logits = own @ ready.T
            if compiled is not None and learns and bias is None and cap is None and logits.is_cuda:
                own_loss, pull = compiled(logits, targets[part], wide, smoothing)
                loss += own_loss
            else:
                pull = logits
                own = own * (targets[part, None] >= 0).to(product)  # zeroes ignored rows, which is less than in pull
                for piece in _pieces(logits):
                    loss += _pull(logits[piece], bias, targets[part][piece], wide, learns, smoothing, cap, grads[2])
            if learns:
                grads[0][part] = pull @ ready
                towards = (pull.T @ own).to(wide)
                grads[1] = towards if grads[1] is None else grads[1].add_(towards)
        unknown = targets[:, None] < 0
        grads[0].masked_fill_(unknown, 0)
        grads[1] = torch.zeros(weight.shape, dtype=wide, device=weight.device) if grads[1] is None else grads[1]
        ctx.save_for_backward(*(grad if learns else None for grad in grads))
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx, gradient):
        states, weight, bias = ctx.saved_tensors
        towards = states * gradient.to(states.dtype), (weight * gradient).to(ctx.types[0])
        return *towards, None if bias is None else (bias * gradient).to(ctx.types[1]), *[None] * 6


def _pieces(logits: Float[Tensor, "N V"]) -> list[slice]:
    """Rows whose softmax stays in a CPU's caches; on a GPU all of them."""
    rows = max(1, PIECE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return [slice(begin, begin + rows) for begin in range(0, len(logits), rows)]


def _pull(
    logits: Float[Tensor, "N V"], bias: Float[Tensor, "V"] | None, targets: Int[Tensor, "N"], wide: torch.dtype,
    learns: bool, smoothing: float, cap: float | None, towards: Float[Tensor, "V"] | None,
) -> Float[Tensor, ""]:  # fmt: skip
    """Summed cross-entropy of rows with a target. Where it `learns`, `logits` become its gradient, also in the other
    rows, and that of the bias is added to `towards`."""
    known, wanted = (targets[:, None] >= 0).to(wide), targets[:, None].clamp(min=0)
    scores = logits.to(wide) if bias is None else logits.to(wide) + bias
    share = None if cap is None else (scores / cap).tanh_()  # of the cap
    scores = (scores if share is None else cap * share).log_softmax(1)
    loss = -(scores.gather(1, wanted) * known).sum() * (1 - smoothing)
    if smoothing:
        loss -= (scores.mean(1, keepdim=True) * known).sum() * smoothing
    if learns:
        pull = scores.exp_().scatter_add_(1, wanted, -known * (1 - smoothing))
        pull = pull.sub_(smoothing / pull.shape[1]) if smoothing else pull
        pull = pull if share is None else pull.mul_(1 - share.square_())
        if towards is not None:
            towards += (known.T @ pull)[0]
        logits.copy_(pull)
    return loss
