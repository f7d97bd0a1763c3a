"""Questions about an image of 512 x 512 (64 rows beside a question of 16 ids) at SmolVLM-256M's sizes, and frames of a
long video.

Random weights give close logits, so that other rounding soon changes the text: bfloat16 must match float32 in the first
token's logits."""

from benchmarks.suite.cases import Candidate, Case, Options, in_kinds

PEERS = "benchmarks.peers.ask."
OURS, TRANSFORMERS, PREPARE = PEERS + "ours:", PEERS + "transformers:", PEERS + "random_models:prepare"
ROWS, QUESTION, TOKENS, ROUNDS = 64, 16, 64, 5
# multiply-adds: of the image encoder (its blocks and 1,024 x 1,024 attention), of a position and of a token's logits
IMAGE, DECODER, LOGITS = 85.1e6 * 1024 + 12 * 2 * 1024**2 * 768, 106.2e6, 576 * 49280
KINDS = ("float32", "bfloat16", "int8")


def cases(options: Options) -> list[Case]:
    return [
        first(options.tiny), answering(options.tiny), answering(options.tiny, again=True),
        *(sampling(minutes, options.tiny) for minutes in (1, 10)),
    ]  # fmt: skip


def first(tiny: bool) -> Case:
    return Case(
        "ask", "SmolVLM-256M, an image and the first token", "token", 1,
        (*in_kinds("ours", OURS + "first", {}, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "first", {}, "transformers")),
        reference="transformers float32",
        checks={"float32": ("near", 1e-4), "bfloat16": ("cosine", 5e-2), "int8": ("cosine", 5e-2)},
        prepare=PREPARE, settings={"question": QUESTION, "tiny": tiny},
        operations=None if tiny else 2 * (IMAGE + DECODER * (ROWS + QUESTION) + LOGITS), rounds=ROUNDS,
    )  # fmt: skip


def answering(tiny: bool, again: bool = False) -> Case:
    """`again`: tokens after a second question alone, since the image and the first question are known."""
    tokens = 4 if tiny else TOKENS
    settings, new = {"tokens": tokens, "again": again}, tokens - 1 + QUESTION + (0 if again else ROWS)
    name = "a second question" if again else "an image"
    return Case(
        "ask", f"SmolVLM-256M, {name} and {tokens} tokens", "token", tokens,
        (*in_kinds("ours", OURS + "answerer", settings, kinds=KINDS),
         *in_kinds("transformers", TRANSFORMERS + "answerer", settings, "transformers")),
        reference="transformers float32", checks={"float32": ("differing", 0.0)}, prepare=PREPARE,
        settings={"question": QUESTION, "tiny": tiny},
        operations=None if tiny else 2 * ((0 if again else IMAGE) + DECODER * new + LOGITS * tokens),
        bytes=None if tiny else 4 * (DECODER + LOGITS) * tokens, rounds=ROUNDS,
    )  # fmt: skip


def sampling(minutes: int, tiny: bool) -> Case:
    """Memory must not grow with the length."""
    seconds = 6 * minutes if tiny else 60 * minutes
    return Case(
        "ask", f"16 frames of a video of {seconds} s", "second", seconds,
        (Candidate("ours", PEERS + "ours_video:sampled"),
         Candidate("transformers", PEERS + "video:transformers", library="transformers")),
        reference="transformers", checks={"float32": ("near", 0.03)}, prepare=PEERS + "video:prepare",
        settings={"seconds": seconds}, rounds=ROUNDS,
    )  # fmt: skip
