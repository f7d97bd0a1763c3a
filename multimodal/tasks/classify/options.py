"""Options of classification."""

from multimodal.system.options import OptionSet, option


class ClassifyOptions(OptionSet):
    """`threshold`: the answer is None where the best score is below; its range depends on `scores`."""

    top: int | None = option(None, "labels per image (default: 5 in the table, else all)", "N", low=1)
    heatmap_top: int | None = option(None, "labels drawn per image (default: 3)", "N", low=1, high=100)
    scores: str | None = option(None, "kind of scores (default: as the model was trained, or as the classifier was "
                                "calibrated)", choices=("softmax", "sigmoid", "cosine"))  # fmt: skip
    threshold: float | None = option(
        None, "answer 'none of these' if the best score is below T. table and csv then hold only the labels that reach "
        "T, or one row with 'none of these' and no score; json and jsonl hold all scores, and the best label or null "
        "as 'answer'", "T",
    )  # fmt: skip
    calibration: str | None = option(
        None, "temperature: softmax(logits / T), which keeps the order (default); platt: sigmoid(a logit + b) for each "
        "label, so that all scores may be low; platt-per-label: own a and b for each label",
        choices=("temperature", "platt", "platt-per-label"),
    )  # fmt: skip


class ProbeOptions(OptionSet):
    """`max_iterations`: the paper's (Radford et al. 2021) is the default."""

    C: float | None = option(None, "inverse strength of the regularization (default: searched from 1e-6 to 1e6 on "
                             "held-out images)", "C", low=0, high=1e12, above=True)  # fmt: skip
    max_iterations: int = option(1000, "L-BFGS iterations", "N", low=1)
    seed: int = option(0, "seed of the held-out split", "N")


class FewShotOptions(OptionSet):
    C: float | None = ProbeOptions.C
    shots: tuple[int, ...] = option((1, 2, 4, 8, 16), "images per class", "N", low=1)
    seeds: int = option(3, "random draws per number of shots", "N", low=1)
