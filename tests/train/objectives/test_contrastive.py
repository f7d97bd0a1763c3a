"""The contrastive loss in blocks equals its definition, and accumulation leaves the gradient of the one big batch."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from multimodal.errors import UsageError
from multimodal.models.clip import CLIP
from multimodal.train.losses import contrastive_loss
from multimodal.train.objectives.contrastive import Contrastive, Pairs
from multimodal.train.objectives.contrastive_model import ContrastiveModelSettings
from tests.helpers.data.contrast import EXACT, Plain, gradient, matching_loss, noise
from tests.helpers.spread import thin
from tests.helpers.tiny import CLIPS, VOCABULARY


def sigmoid_loss(logits: Tensor, same: Tensor) -> Tensor:
    """Zhai et al. 2023, equation 1."""
    return -F.logsigmoid(torch.where(same, logits, -logits)).sum() / len(logits)


def features(count: int = 7, texts: int = 5):
    found = [F.normalize(noise(n, 4, seed=n), dim=-1) for n in (count, texts)]
    scalars = [torch.tensor(x, dtype=torch.float64) for x in (9.0, -3.0)]
    concepts, terms = torch.arange(count) % 4, torch.tensor([0, 1, 2, 3, 1, 6])[:texts]
    return [x.requires_grad_() for x in (*found, *scalars)], concepts, terms


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("block", [2**24, 10])
def test_blocks_give_the_definitions_loss_and_gradient(sigmoid, block):
    leaves, concepts, terms = features()
    loss = contrastive_loss(*leaves, concepts=concepts, terms=terms, sigmoid=sigmoid, block=block)
    images, texts, scale, bias = leaves
    expected = (sigmoid_loss if sigmoid else matching_loss)(scale * images @ texts.T + bias, concepts[:, None] == terms)
    assert_close(loss, expected, **EXACT)
    for mine, theirs in zip(
        torch.autograd.grad(loss * 3, leaves), torch.autograd.grad(expected * 3, leaves), strict=True
    ):
        assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
def test_pairs_in_order_equal_open_clip(name):
    import open_clip.loss

    (images, texts, scale, bias), _, _ = features(6, 6)
    scalars = (scale, bias) if name == "SigLipLoss" else (scale,)
    theirs = getattr(open_clip.loss, name)()(images, texts, *scalars)
    assert_close(contrastive_loss(images, texts, *scalars, sigmoid=name == "SigLipLoss"), theirs, **EXACT)


def test_texts_that_fit_nothing_are_negatives_only():
    (images, texts, scale, _), concepts, terms = features(7, 6)  # no image is of concept 6
    scores = scale * images @ texts.T
    same = concepts[:, None] == terms
    target = same.double()
    rows = -(target / target.sum(1, keepdim=True) * scores.log_softmax(1)).sum(1).mean()
    columns = -(target[:, :5] / target[:, :5].sum(0) * scores.log_softmax(0)[:, :5]).sum(0).mean()
    loss = contrastive_loss(images, texts, scale, concepts=concepts, terms=terms)
    assert_close(loss, (rows + columns) / 2, **EXACT)


def tiny(kind: str) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(CLIPS[kind]).double()
    for parameter in model.parameters():
        if parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def pairs(count: int, grouped: bool = False) -> Pairs:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY - 2, (count, 9), generator=generator)
    ids[:, -1] = VOCABULARY - 1
    images = torch.randn(count, 3, 8, 12, generator=generator, dtype=torch.float64)
    order = torch.rand(count, 6, generator=generator).argsort(1)
    groups = torch.arange(count) % 3 if grouped else None
    return Pairs(images, ids, ids > 0, groups, groups, order)


def cut(batch: Pairs, sizes: list[int]) -> list[Pairs]:
    parts = [[None] * len(sizes) if x is None else x.split(sizes) for x in batch]
    return [Pairs(*part) for part in zip(*parts, strict=True)]


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("grouped", [False, True])
def test_accumulation_is_exact(kind, grouped):
    objective, batch = Contrastive(tiny(kind), keep=lambda step: 0.5), pairs(8, grouped)
    loss, whole = gradient(objective, [batch])
    features = objective.model.encode_image(batch.images, batch.order[:, :3]), objective.model.encode_text(batch.ids)
    logits = objective.model.logits(*features)
    same = torch.eye(8, dtype=torch.bool) if not grouped else batch.concepts[:, None] == batch.terms
    assert loss == pytest.approx((sigmoid_loss if kind == "sigmoid" else matching_loss)(logits, same).item(), abs=1e-9)
    for sizes in ([4, 4], [2, 2, 2, 2], [1, 5, 2]):
        again, found = gradient(objective, cut(batch, sizes))
        assert again == pytest.approx(loss, abs=1e-9)
        for name, expected in whole.items():
            assert_close(found[name], expected, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_anchored_texts_are_drawn_back_to_where_they_were():
    """The weight times the mean of 1 - cosine over texts without a match and of terms from `anchored` on, whatever the
    micro-batches; no other text feels it."""
    batch = pairs(8, grouped=True)._replace(terms=torch.tensor([0, 1, 2, -1, 0, 1, 2, -1]))
    for weight in (0.0, 5.0):
        objective = Contrastive(tiny("softmax"), anchor=weight, anchored=2)
        before = objective.model.encode_text(batch.ids, batch.valid).detach()
        torch.manual_seed(1)
        for parameter in objective.model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        whole = gradient(objective, [batch])
        for sizes in ([4, 4], [1, 5, 2]):
            again = gradient(objective, cut(batch, sizes))
            assert again[0] == pytest.approx(whole[0], abs=1e-9)
            assert_close(again[1], whole[1], **EXACT)
        if not weight:
            free = whole
    assert not any(name.startswith("before") for name in objective.state_dict())
    now = objective.model.encode_text(batch.ids, batch.valid)
    moved = 5 * (1 - F.cosine_similarity(now, before)[[2, 3, 6, 7]].mean())
    objective.zero_grad()
    moved.backward()
    assert whole[0] - free[0] == pytest.approx(moved.item(), abs=1e-9)
    for name, parameter in objective.model.named_parameters():
        pull = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(whole[1][name] - free[1][name], pull, **EXACT)


def test_open_clips_accumulation_makes_the_scale_k_times_too_large():
    """As in open_clip's training: the loss of all features once a micro-batch, with its own ones in place."""
    objective, batch = Contrastive(tiny("sigmoid")), pairs(8)
    _, exact = gradient(objective, cut(batch, [2, 2, 2, 2]))
    model = objective.model
    model.zero_grad()
    with torch.no_grad():
        cached = [objective(part)[:2] for part in cut(batch, [2, 2, 2, 2])]
    for number, part in enumerate(cut(batch, [2, 2, 2, 2])):
        images, texts, *scalars = objective(part)
        columns = [list(x) for x in zip(*cached, strict=True)]
        columns[0][number], columns[1][number] = images, texts
        contrastive_loss(*(torch.cat(column) for column in columns), *scalars, sigmoid=True).backward()
    assert_close(model.text_project.weight.grad, exact["text_project.weight"], **EXACT)
    for name in ("logit_scale", "logit_bias"):
        assert_close(getattr(model, name).grad, 4 * exact[name], **EXACT)


def test_what_is_dropped_is_dropped_again():
    config = CLIPS["softmax"]
    stack = replace(config.image.stack, drop_path=0.5)
    torch.manual_seed(0)
    objective = Contrastive(CLIP(replace(config, image=replace(config.image, stack=stack))).double().train())
    seen = []
    objective.register_forward_hook(lambda module, batch, found: seen.append(found[0].detach()))
    gradient(objective, cut(pairs(8), [4, 4]))
    assert len(seen) == 4
    assert_close(seen[:2], seen[2:], **EXACT)
    assert not torch.equal(seen[0], objective.eval()(cut(pairs(8), [4, 4])[0])[0])


@pytest.mark.parametrize(("loaded", "kept"), [(2.0, math.log(100)), (4.77, 4.77)])  # SigLIP's is over 100
def test_scale_is_bounded_after_a_step_but_not_below_the_loaded_one(loaded, kept):
    model = tiny("softmax")
    torch.nn.init.constant_(model.logit_scale, loaded)
    objective = Contrastive(model)
    objective.after_step()
    assert model.logit_scale.item() == pytest.approx(loaded)
    torch.nn.init.constant_(model.logit_scale, 6.0)
    objective.after_step()
    assert model.logit_scale.item() == pytest.approx(kept)


def test_at_least_one_patch_is_seen():
    assert Contrastive(tiny("softmax"), keep=lambda step: 0.01).at_step(pairs(4), 0).order.shape == (4, 1)


def test_unequal_counts_need_to_say_what_fits():
    objective, batch = Contrastive(tiny("softmax")), pairs(4)
    with pytest.raises(ValueError, match="concepts and terms are needed for 4 images and 3 texts"):
        objective.backward(Plain(objective), [batch._replace(ids=batch.ids[:3], valid=None)])


@pytest.mark.parametrize(("name", "width", "head"), [("width", 32, 64), ("width", 100, 64), ("text_width", 100, 32)])
def test_a_width_that_its_heads_do_not_divide_is_refused(name, width, head):
    with pytest.raises(UsageError, match=f"{name} must be a multiple of {head}, the width of its heads"):
        ContrastiveModelSettings(**{name: width})
