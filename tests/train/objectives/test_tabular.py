"""Tables: the FT-Transformer's tokens and quantiles, what is missing or unknown, parts, exact gradients, and trees."""

import gzip
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from multimodal.data.datasets.tables import Columns, encode, read_table, split
from multimodal.errors import CheckpointError, DataError
from multimodal.models.tabular import FTTransformer, TabularConfig, ft_stack, normal_scores
from multimodal.models.vit import ViT
from multimodal.tasks.evaluate.classification import outputs, predictions, table_figures
from multimodal.train.objectives.tabular import (
    TableBatch,
    Tabular,
    boosting,
    fit_scales,
)
from multimodal.weights.folder import Checkpoint, load_folder, save_folder
from tests.helpers.data.contrast import gradient
from tests.helpers.tiny import TABULAR, WIDTH, made, randomized


def rows(seed: int = 0, count: int = 6) -> TableBatch:
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, 3, generator=source)
    numbers[0, 1] = math.nan
    categories = torch.stack([torch.randint(size, (count,), generator=source) for size in (4, 2)], 1)
    return TableBatch(numbers, categories, torch.randint(2, (count,), generator=source))


def test_tokens_are_those_of_the_paper_and_the_first_block_has_no_first_norm():
    model, batch, seen = made("tabular"), rows(), []
    model.quantiles.copy_(torch.linspace(-2, 2, 5).repeat(3, 1))
    model.stack.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        found = model(batch.numbers, batch.categories)
        values = normal_scores(batch.numbers.nan_to_num(), model.quantiles).float()
        for row in range(6):
            tokens = [model.class_token]
            for i in range(3):
                own = model.missing[i] if batch.numbers[row, i].isnan() else values[row, i] * model.weight[i]
                tokens.append(own + model.bias[i])
            for i, first in enumerate((0, 4)):
                tokens.append(model.table.weight[first + batch.categories[row, i]] + model.bias[3 + i])
            assert_close(seen[0][row], torch.stack(tokens))
        block = model.stack.blocks[0]
        x = seen[0] + block.attention(seen[0])
        x = x + block.feed(block.feed_branch.norm(x))
        state = model.stack.norm(model.stack.blocks[1](x))[:, 0]
        wanted = model.head(state.relu()) * model.scale + model.shift
    assert_close(found, wanted.double(), atol=1e-5, rtol=1e-5)


def test_quantiles_are_scikit_learns_and_repeated_ones_are_in_their_middle():
    from sklearn.preprocessing import QuantileTransformer

    source = np.random.default_rng(0)
    x = np.stack([source.normal(size=2000), source.poisson(3, 2000), np.where(source.random(2000) < 0.7, 5,
                                                                            source.normal(5, 2, 2000))], 1)  # fmt: skip
    theirs = QuantileTransformer(n_quantiles=50, output_distribution="normal", subsample=None).fit(x)
    knots, values = torch.from_numpy(theirs.quantiles_.T.copy()), np.concatenate([x, [[9e9] * 3, [-9e9] * 3]])
    ours, wanted = normal_scores(torch.from_numpy(values), knots).numpy(), theirs.transform(values)
    inner = (values != knots[:, 0].numpy()) & (values != knots[:, -1].numpy())  # there it says ±5.2
    assert inner.mean() > 0.9
    assert np.abs(ours - wanted)[inner].max() < 1e-6
    few = torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0]])
    scores = normal_scores(torch.tensor([[0.0], [1.0], [-1.0], [7.0]]), few)[:, 0]
    assert_close(scores[:2], torch.special.ndtri(torch.tensor([0.25, 0.75], dtype=torch.float64)))
    assert_close(scores[2:], torch.special.ndtri(torch.tensor([1e-7, 1 - 1e-7], dtype=torch.float64)))


def test_scales_are_those_of_the_training_rows():
    model = FTTransformer(TabularConfig(2, (), 3, 1, ft_stack(8, 1, 2)))
    table = {"a": ["1", "", "3", "2"], "b": ["0", "0", "0", "10"], "y": ["2", "4", "6", "8"]}
    columns = Columns.of(table, "y", "number")
    train = encode(table, columns, "here")
    fit_scales(model, train, regression=True)
    assert model.quantiles.tolist() == [[1, 2, 3], [0, 0, 10]]
    assert model.shift == 5
    assert model.scale == pytest.approx(20**0.5 / 3**0.5)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(2.0)
    found = outputs(model.eval(), train)
    assert_close(found[:, 0], 5 + 2 * model.scale.double().expand(4))
    figures = table_figures(found, train)
    assert figures["rmse"] == pytest.approx(float((found[:, 0] - train.targets).square().mean().sqrt()))


def test_a_category_that_the_column_has_not_is_refused():
    batch = rows()
    with pytest.raises(ValueError, match=r"categories must be at least 0 and below \[4, 2\]"):
        made("tabular")(batch.numbers, batch.categories + 1)


@pytest.mark.parametrize("outputs_", [1, 2])
def test_accumulation_is_exact(outputs_):
    config = TabularConfig(3, (4, 2), 5, outputs_, TABULAR.stack)
    objective = Tabular(randomized(FTTransformer(config)).double())
    objective.model.quantiles.copy_(torch.linspace(-2, 2, 5).repeat(3, 1))
    batch = rows(count=6)
    if outputs_ == 1:
        batch = batch._replace(targets=batch.targets.float())
    loss, whole = gradient(objective, [batch])
    parts, summed = gradient(objective, [TableBatch(*(x[:1] for x in batch)), TableBatch(*(x[1:] for x in batch))])
    assert parts == pytest.approx(loss, rel=1e-5)
    for name, grad in whole.items():
        assert_close(summed[name], grad, atol=1e-5, rtol=1e-5)
    assert whole["missing"].abs().sum(1).gt(0).tolist() == [False, True, False]
    assert whole["class_token"].shape == (WIDTH,)


CSV = "age, job,town,y\n31, cook,Ulm,yes\n40,?,Bonn,no\n,cook,Ulm,yes\n25,smith,Ulm,no\n"


def test_columns_and_cells_are_read_and_unknown_ones_said(tmp_path, caplog):
    (tmp_path / "t.csv").write_text(CSV)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(CSV.partition("\n")[2].encode()))
    table = read_table(tmp_path / "t.csv")
    assert read_table(tmp_path / "t.csv.gz", ("age", "job", "town", "y")) == table
    with pytest.raises(DataError, match=r"t\.csv: line 1 is a header: names of columns are for a file without one"):
        read_table(tmp_path / "t.csv", ("age", "job", "town", "y"))
    columns = Columns.of(table, "y")
    assert columns == Columns("y", ("age",), {"job": ["cook", "smith"], "town": ["Bonn", "Ulm"]}, ("no", "yes"))
    assert Columns.from_card({"table": columns.card()}, "here") == columns
    other = {"age": ["?", "3"], "job": ["cook", "queen"], "town": ["", "Ulm"], "y": ["no", "yes."]}
    with caplog.at_level("INFO"):
        found = encode(other, columns, "test part")
    assert found.numbers[:, 0].isnan().tolist() == [True, False]
    assert found.categories.tolist() == [[1, 0], [0, 2]]
    assert found.targets.tolist() == [0, 1]
    assert "missing: 1 numbers, 1 categories" in caplog.text
    assert "categories not in the training part: job queen" in caplog.text
    assert encode({name: cells for name, cells in other.items() if name != "y"}, columns, "x").targets is None


def test_labels_that_differ_by_a_full_stop_and_numbers_with_underscores_stay_apart():
    table = {"x": ["12_05", "1205", "7"], "y": ["Inc", "Inc.", "Ltd."]}
    columns = Columns.of(table, "y")
    assert (columns.labels, columns.numbers) == (("Inc", "Inc.", "Ltd."), ())
    assert columns.categories == {"x": ["1205", "12_05", "7"]}
    assert encode(table, columns, "here").targets.tolist() == [0, 1, 2]


@pytest.mark.parametrize("cell", ["NA", "NaN", "nan", "N/A", "null", "None", ""])
def test_what_pandas_takes_as_missing_leaves_a_column_of_numbers(cell):
    table = {"x": ["1", "2", cell, "4"], "job": ["cook", "NA", "smith", "cook"], "y": ["a", "b", "a", "b"]}
    columns = Columns.of(table, "y")
    assert (columns.numbers, columns.categories) == (("x",), {"job": ["NA", "cook", "smith"]})
    assert encode(table, columns, "here").numbers[:, 0].isnan().tolist() == [False, False, True, False]


def test_a_column_that_is_mostly_numbers_is_said(caplog):
    table = {"x": [*map(str, range(19)), "1,234.5"], "few": ["1", "2", "old", "3"] * 5, "y": ["a", "b"] * 10}
    assert set(Columns.of(table, "y").categories) == {"x", "few"}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "column x is taken as categories, though 19 of 20 cells are numbers; not so '1,234.5'"]  # fmt: skip


def test_a_large_number_keeps_its_digits_as_target_and_is_said_as_column(caplog):
    cells = [str(100_000_000 + i / 4) for i in range(100)]
    table = {
        "x": cells,
        "even": ["0", "1"] * 50,
        "time": [str(1_700_000_000 + 1000 * i) for i in range(100)],
        "y": cells,
    }
    columns = Columns.of(table, "y")
    assert [record.getMessage() for record in caplog.records] == [
        "column x is rounded to 32-bit numbers, 100000004.0 to 100000000: subtract a constant from all its cells"
    ]
    train = encode(table, columns, "here")
    assert train.targets.tolist() == [float(cell) for cell in cells]
    model = FTTransformer(TabularConfig(3, (), 3, 1, ft_stack(8, 1, 2)))
    fit_scales(model, train, regression=True)
    assert model.scale == pytest.approx(float(np.std(train.targets.numpy(), ddof=1)))
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(0.1)
    found = outputs(model.eval(), train)
    assert_close(found[:, 0], (model.shift.double() + 0.1 * model.scale.double()).expand(100), rtol=1e-12, atol=0)
    loss = Tabular(model)(TableBatch(*train))["loss"].detach()
    wanted = ((found[:, 0] - train.targets) / model.scale.double()).square().sum()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)


def test_numbers_of_many_kinds_are_predicted_as_numbers():
    table = {"x": [str(i) for i in range(30)], "y": [str(i / 3) for i in range(30)]}
    assert Columns.of(table, "y").labels == ()
    assert len(Columns.of(table, "y", "class").labels) == 30
    assert Columns.of({"x": ["1", "2"], "y": ["0", "1"]}, "y").labels == ("0", "1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "t.csv: has no rows (0 characters)"),
        ("a,b\n", "t.csv: has no rows (4 characters)"),
        (f"a,b\n1,{'2' * 200_000}\n", "t.csv: line 2: not CSV (field larger than field limit (131072))"),
        ("a,b\n1,2\n\n3\n", "t.csv: line 4 has 1 columns, not 2 (separated by commas)"),
        ("a,a\n1,2\n", "t.csv: duplicate column (a, a)"),
        ("a,b\n1,2\n", "target y: no such column (a, b)"),
        ("a,y\n1,2\n3,2\n", "target y: has one value only (2)"),
        ("a,y\n?,1\n,2\n", "target y: no other column has values to predict it from"),
        ("y\n1\n2\n", "target y: no other column has values to predict it from"),
    ],
)
def test_a_table_that_cannot_be_used_is_said_in_one_line(tmp_path, text, line):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError) as found:
        Columns.of(read_table(tmp_path / "t.csv"), "y")
    assert str(found.value).endswith(line)
    with pytest.raises(DataError, match=r"none\.csv: cannot be read"):
        read_table(tmp_path / "none.csv")


def test_a_target_that_is_missing_is_said_by_its_line(tmp_path):
    for text, line in (("a\n1\n", "lacks the column y (a)"), ("a,y\n1,x\n\n2,?\n3,\n", "line 4 has no value in the "
                       "column y (2 such lines)"), ("a,y\n1,2.5\n2,NA\n", "line 3 has no value in the column y (1 such "
                       "lines)")):  # fmt: skip
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(DataError) as found:
            read_table(tmp_path / "t.csv", target="y")
        assert str(found.value) == f"{tmp_path / 't.csv'}: {line}"
    (tmp_path / "t.csv").write_text("a,y\n1,None\n2,some\n")
    assert read_table(tmp_path / "t.csv", target="y")["y"] == ["None", "some"]


def test_a_table_that_does_not_fit_the_columns_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    table = read_table(tmp_path / "t.csv")
    columns = Columns.of(table, "y")
    for change, line in (
        (
            {"y": ["maybe"] * 4},
            "test: label 'maybe' is not in the training part (no, yes); a class of few rows may fall "
            "into one part of a split",
        ),
        ({"age": ["old"] * 4}, "test: column age must hold numbers up to 3.4e38, got 'old'"),
        ({"age": ["1e39"] * 4}, "test: column age must hold numbers up to 3.4e38, got '1e39'"),
        ({"town": None}, "test: lacks the column town (age, job, y)"),
    ):
        other = {name: cells for name, cells in (table | change).items() if cells is not None}
        with pytest.raises(DataError) as found:
            encode(other, columns, "test")
        assert str(found.value) == line


def test_parts_are_fixed_by_the_seed_and_have_each_row_once():
    table = {"a": [str(i) for i in range(50)]}
    one, again, other = (split(table, (0.64, 0.16, 0.2), seed) for seed in (0, 0, 1))
    assert [len(part["a"]) for part in one] == [32, 8, 10]
    assert sorted((cell for part in one for cell in part["a"]), key=int) == table["a"]
    assert one == again
    assert one != other
    with pytest.raises(DataError, match="data holds 1 rows, too few for parts of"):
        split({"a": ["1"]}, (0.5, 0.5), 0)


def function(count: int) -> dict[str, list[str]]:
    source = np.random.default_rng(0)
    x, kind = source.normal(size=count), source.integers(0, 2, count)
    return {"x": [f"{v:.4f}" for v in x], "kind": [f"k{k}" for k in kind],
            "y": [f"{3 * abs(v) + 5 * k:.4f}" for v, k in zip(x, kind, strict=True)]}  # fmt: skip


@pytest.mark.ci
def test_gradient_boosting_learns_and_its_trees_are_chosen_on_the_validation_part():
    columns = Columns.of(function(400), "y")
    train, val, test = (encode(part, columns, "part") for part in split(function(400), (0.64, 0.16, 0.2), 0))
    found = boosting(train, val, test, columns, 0, most=60)
    assert found["rmse"] < 0.4 * float(test.targets.std())
    assert 1 <= found["trees"] <= 60
    labelled = {**function(400), "y": [str(float(y) > 4) for y in function(400)["y"]]}
    columns = Columns.of(labelled, "y")
    train, val, test = (encode(part, columns, "part") for part in split(labelled, (0.64, 0.16, 0.2), 0))
    figures = boosting(train, val, test, columns, 0, most=60)
    assert figures["accuracy"] > 0.8
    assert figures["auc"] > 0.95


def test_gradient_boosting_takes_the_rare_ones_of_many_categories_together():
    words = [f"w{i}" for i in range(300)]
    table = {"text": [*words, *(["often"] * 100)], "y": [*(["no"] * 300), *(["yes"] * 100)]}
    columns = Columns.of(table, "y")
    rows = encode(table, columns, "here")
    assert boosting(rows, rows, rows, columns, 0, most=20)["accuracy"] == 1


def test_a_saved_model_predicts_for_another_table(tmp_path):
    table = {"x": ["1", "2", "3"], "job": ["cook", "smith", "cook"], "y": ["no", "yes", "no"]}
    columns = Columns.of(table, "y")
    model = randomized(FTTransformer(TabularConfig(1, (3,), 4, 2, ft_stack(8, 1, 2))))
    fit_scales(model, encode(table, columns, "here"), regression=False)
    save_folder(Checkpoint(model, card={"table": columns.card()}), tmp_path / "out")
    checkpoint = load_folder(tmp_path / "out")
    found = predictions(checkpoint, {"job": ["cook", "king"], "x": ["2", "?"]})
    with torch.no_grad():
        wanted = model(torch.tensor([[2.0], [math.nan]]), torch.tensor([[1], [0]])).softmax(-1)
    for row, own in zip(found, wanted, strict=True):
        assert row == pytest.approx({"no": float(own[0]), "yes": float(own[1])}, abs=1e-6)
    with pytest.raises(CheckpointError, match="its card has no columns"):
        predictions(Checkpoint(model, source="here"), table)
    with pytest.raises(CheckpointError, match="expected a tabular model, got vit"):
        predictions(Checkpoint(ViT(made("vit-token").config), source="here"), table)
