"""Native aspect ratios: a mixed batch equals each image alone, timm's NaFlexVit and the usual preprocessing."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from multimodal.cli.main import main
from multimodal.errors import ImageError, UsageError
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.images import pixels_of
from multimodal.tasks.encode.native import encode_native, native_batches, native_features, native_pixels
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.load import load, load_foreign
from tests.helpers.references.vision import case
from tests.helpers.spread import thin
from tests.helpers.tiny import CLIPS, VITS, made, randomized

RECORD = Preprocessing((8, 8), "shortest", "bicubic", (0.5, 0.4, 0.3), (0.2, 0.2, 0.3), 0, 1.0)
GRIDS = [(2, 3), (3, 2), (1, 4), (4, 4), (2, 3), (1, 1), (6, 1)]


def noise(grids: list[tuple[int, int]], patch: int = 4, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(3, rows * patch, columns * patch, generator=source) for rows, columns in grids]


def files(folder: Path, sizes: list[tuple[int, int]]) -> list[Path]:
    paths = []
    for number, size in enumerate(sizes):
        image = Image.radial_gradient("L").resize(size).convert("RGB").rotate(40 * number)
        paths.append(folder / f"{number}.png")
        image.save(paths[-1])
    return paths


@pytest.mark.parametrize("name", VITS)
@torch.inference_mode()
def test_vit_of_mixed_sizes_is_that_of_each_alone(name):
    model, images = made(f"vit-{name}"), noise(GRIDS)
    images[1][:] = float("nan")  # harms no other
    together = model(images)
    for row, image in enumerate(images):
        if row != 1:
            assert_close(together[row : row + 1], model(image[None]), atol=1e-5, rtol=0)
    tokens, valid = model.ragged(images)
    assert valid.sum(1).tolist() == [model.config.prefix + rows * columns for rows, columns in GRIDS]
    assert_close(tokens[5][valid[5]], model.tokens(images[5][None])[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("grid", [(2, 3), (1, 7), (5, 2), (9, 11)])
def test_positions_equal_timms(grid):
    from timm.layers import resample_abs_pos_embed

    model = made("vit-token")
    theirs = resample_abs_pos_embed(model.positions[None], list(grid), [2, 3], num_prefix_tokens=1)[0]
    for learning in (True, False):
        with torch.set_grad_enabled(learning):
            assert_close(model.grid_positions(grid), theirs, atol=1e-6, rtol=0)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("name", [*(f"clip-{name}" for name in CLIPS), "coca"])
@torch.inference_mode()
def test_clip_of_any_token_budget_is_that_of_each_alone(name):
    model, images = made(name), noise(GRIDS)
    alone = torch.cat([model.encode_image(image[None]) for image in images])
    prefix, tokens = model.config.image.prefix, sum(rows * columns for rows, columns in GRIDS)
    sizes = []
    model.image.stack.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[:2].numel()))
    for budget in (1, 20, 40, 1000):
        sizes.clear()
        encoded = encode_native(model, images, budget)
        assert max(sizes) <= max(budget, 16 + prefix)
        assert len(sizes) == {1: 7, 1000: 1}.get(budget, len(sizes))
        assert_close(encoded, alone, atol=1e-5, rtol=0)
        assert encoded.norm(dim=-1).allclose(torch.ones(len(images)))
    assert sum(sizes) == 7 * (16 + prefix)  # all as long as 4x4
    sizes.clear()
    encode_native(model, images, 1)
    assert sum(sizes) == tokens + 7 * prefix  # without padding


@torch.inference_mode()
def test_learned_shape_equals_the_usual_path_to_the_bit(tmp_path):
    model = made("clip-softmax")  # learned at 8x12 pixels, six patches
    paths = files(tmp_path, [(90, 60), (45, 30), (12, 8), (300, 200)])
    record = RECORD.replace(size=(8, 12))
    usual = model.encode_image(pixels_of(paths, record))
    assert torch.equal(native_features(model, paths, record), usual)
    others = [path.rename(path.with_stem(f"other{path.stem}")) for path in files(tmp_path, [(60, 90), (50, 50)])]
    paths = files(tmp_path, [(90, 60), (45, 30), (12, 8), (300, 200)])
    mixed = native_features(model, [*paths, *others], record)
    assert_close(mixed[:4], usual, atol=1e-6, rtol=0)


@torch.inference_mode()
def test_order_and_refusals_of_a_stream(tmp_path):
    model = made("clip-sigmoid")
    paths = files(tmp_path, [(30, 20), (20, 30), (61, 7), (40, 40), (16, 35)])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    strip, dot = tmp_path / "strip.png", tmp_path / "dot.png"
    Image.new("RGB", (800, 8)).save(strip)
    Image.new("RGB", (3, 3)).save(dot)
    everything = [*paths[:2], tmp_path / "broken.png", strip, *paths[2:], dot]
    batches = list(native_batches(model, everything, RECORD, 12, batch_size=3))
    assert len(batches) > 1
    assert [path for batch in batches for path in batch.read] == paths
    causes = [str(error) for batch in batches for _, error in batch.refused]
    assert [path for batch in batches for path, _ in batch.refused] == [tmp_path / "broken.png", strip, dot]
    assert "strip.png: 800x8 pixels are longer than a row of 12 patches" in causes[1]
    assert "dot.png: 3x3 pixels are smaller than one patch (4x4)" in causes[2]
    streamed = torch.cat([encode_native(model, batch.pixels) for batch in batches])
    alone = torch.cat([model.encode_image(native_pixels(path, RECORD, 4, 12)[None]) for path in paths])
    assert_close(streamed, alone, atol=1e-5, rtol=0)
    with pytest.raises(ImageError, match=r"strip\.png"):
        native_features(model, everything[3:], RECORD, 12)
    assert native_features(model, [], RECORD).shape == (0, 16)


def test_image_keeps_its_aspect_and_its_edges():
    wide = Image.new("RGB", (100, 50), "black")
    wide.paste("white", (98, 0, 100, 50))
    pixels = native_pixels(wide, RECORD.replace(crop=0.5, mean=(0.0,) * 3, std=(1.0,) * 3), 4, 32)
    assert pixels.shape == (3, 16, 32)  # 4 x 8 patches
    assert pixels[..., -1].mean() > 0.4  # the last columns are there: nothing is cropped
    assert pixels[..., :28].abs().max() < 0.1


def test_what_cannot_be_done_is_refused():
    captioner = made("captioner")
    with pytest.raises(UsageError, match="expected a CLIP or ViT model, got VisionEncoderDecoder"):
        native_features(captioner, [], RECORD)
    with pytest.raises(UsageError, match="pool is 'none'"):
        native_features(captioner.image, [], RECORD)
    with pytest.raises(UsageError, match="max_tokens must be in"):
        native_features(made("vit-mean"), [], RECORD, 0)


@pytest.mark.ci
def test_command_takes_images_whole(tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    files(folder, [(90, 60), (300, 120), (64, 64)])
    Image.new("RGB", (1600, 17)).save(folder / "strip.png")
    found = {}
    for name, extra in {"": [], "64": ["--native", "64"], "learned": ["--batch_size", "2", "--native"]}.items():
        with pytest.raises(SystemExit) as stop:
            main(["classify", "--labels", "panda", "lamp", "--format", "csv", *extra, str(folder)])
        out, err = capsys.readouterr()
        found[name] = [float(line.split(",")[-1]) for line in sorted(out.splitlines()[1:])]
        assert stop.value.code == (1 if extra else 0)
        assert ("strip.png: 1600x17 pixels are longer than a row of" in err) == bool(extra)
    assert len(found[""]) == 8
    assert found["learned"][4:] == pytest.approx(found[""][4:6], abs=2e-5)  # the square one: as ever
    assert found["learned"][2] != pytest.approx(found[""][2], abs=1e-4)
    checkpoint = load("clip-vit-16")
    classifier = ZeroShotClassifier(checkpoint, ["panda", "lamp"])
    pixels = tuple(native_pixels(folder / f"{n}.png", checkpoint.preprocessing, 16, 64) for n in range(3))
    expected = classifier.probabilities(pixels).sort(descending=True).values.flatten().tolist()
    assert sorted(found["64"]) == pytest.approx(sorted(expected), abs=2e-5)


def naflex_batch(images: list[Tensor], patch: int) -> dict[str, Tensor]:
    """Batch of timm's NaFlex collator: patches as (row, column, channel), padded, with coordinates."""
    grids = [(image.shape[1] // patch, image.shape[2] // patch) for image in images]
    most = max(rows * columns for rows, columns in grids)
    made = {"patches": torch.zeros(len(images), most, 3 * patch**2), "patch_coord": torch.zeros(len(images), most, 2),
            "patch_valid": torch.zeros(len(images), most, dtype=torch.bool)}  # fmt: skip
    for row, (image, (rows, columns)) in enumerate(zip(images, grids, strict=True)):
        grid = image.unflatten(2, (columns, patch)).unflatten(1, (rows, patch))
        own = grid.permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
        made["patches"][row, : len(own)] = own
        made["patch_coord"][row, : len(own)] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        made["patch_valid"][row, : len(own)] = True
    made["patch_coord"] = made["patch_coord"].long()
    return made


NAFLEX = {
    "token": ("vit_tiny_patch16_224", {}),
    "mean": ("vit_base_patch16_gap_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 3, "no_embed_class": True, "init_values": 0.1}),
    "map": ("vit_base_patch16_siglip_224", {}),
}


@pytest.mark.parametrize("name", NAFLEX)
@torch.inference_mode()
def test_mixed_batch_equals_timms_naflexvit(name):
    import timm

    architecture, extra = NAFLEX[name]
    args = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": 64, **extra}
    classic = randomized(timm.create_model(architecture, num_classes=5, **args))
    config = {"architecture": architecture, "num_classes": 5, "model_args": args, "global_pool": classic.global_pool}
    ours = load_foreign(classic.state_dict(), config, "timm").model
    flex = timm.create_model(architecture, num_classes=5, use_naflex=True, **args).eval()
    from timm.models.naflexvit import checkpoint_filter_fn

    flex.load_state_dict(checkpoint_filter_fn({k: v.clone() for k, v in classic.state_dict().items()}, flex))
    images = noise([(4, 4), (2, 7), (5, 3), (1, 6), (8, 2)], 16)
    assert_close(ours(images), flex(naflex_batch(images, 16)), atol=1e-5, rtol=1e-5)


def test_timm_model_with_dynamic_size_agrees_on_other_grids():
    reference = case("timm ViT, mean pool")
    ours = load_foreign(reference.tensors, reference.config, "timm").model
    images = noise([(1, 3), (5, 2)], 16)
    with torch.inference_mode():
        theirs = torch.cat([reference.reference(image[None]) for image in images])
        assert_close(ours(images), theirs, atol=1e-5, rtol=1e-5)
