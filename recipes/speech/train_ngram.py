r"""Train an n-gram language model of words, for the beams of a recognizer (`multimodal transcribe --lm`).

    data=data/speech
    python recipes/speech/train_ngram.py words.arpa --order 3 \
        --texts $data/an4/train.jsonl $data/speechocean762/train.jsonl

Interpolated modified Kneser-Ney (Chen & Goodman 1999) with discounts from the counts of counts, without pruning, as
ARPA (`.arpa` or `.arpa.gz`). Texts are plain text with one sentence per line or the texts of JSON lines or CSV, all of
them gzip or not, or tars. Words must be spelled as the recognizer writes them: asr-conformer-en writes lower case and
no punctuation but the apostrophe, which `--plain` makes of any text.

Cost: 2 s of one core for the command, 7 s for 700,000 n-grams. Word error rates in percent of asr-conformer-en with
the words.arpa of the command, beam 5, CTC weight 0.3 in the joint decoder. Weight and bonus were chosen on valid, the
200 texts of speechocean762's. In brackets: without the sentences that are also in the training texts, of which AN4's
test has 20 %, speechocean762's first 200 have 20 %, valid 0.5 %, FSDD none.

| decoder | lm_weight | lm_bonus | valid | AN4 test | speechocean762 test, first 200 | FSDD test |
|---|---|---|---|---|---|---|
| CTC best path | | | 56.8 | 10.6 (12.8) | 71.1 (73.1) | 4.0 |
| CTC prefix beam | | | 56.2 | 9.9 (12.0) | 70.8 (73.0) | 3.7 |
| CTC prefix beam | 0.4 | | 45.1 | 8.6 (10.6) | 58.5 (60.9) | 1.7 |
| CTC prefix beam | 0.6 | 1.5 | 43.0 | 8.2 (10.2) | 53.7 (57.4) | 1.7 |
| joint | | | 40.8 | 6.1 (7.5) | 55.0 (58.6) | 1.0 |
| joint | 0.3 | | 38.3 | 7.2 (8.9) | 48.8 (52.5) | 1.0 |
| joint | 0.4 | 0.5 | 37.7 | 6.5 (8.0) | 48.8 (53.2) | 1.0 |

AN4 is spelled letters and digits in no order: there the joint decoder alone is better. Orders 2 and 4 are within 1.3 of
order 3 on valid.
"""

import gzip
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from multimodal.data.datasets.speech import plain
from multimodal.data.datasets.text import listed_texts
from multimodal.data.manifests import is_manifest, read_text
from multimodal.data.remote.trust import Trust
from multimodal.data.shards import TARS
from multimodal.data.sources import ListColumns, open_source
from multimodal.decoding.ngram import END, START, UNKNOWN
from multimodal.errors import DataError, UsageError
from multimodal.system.outputs import Outputs, write_output
from multimodal.train import start

Gram = tuple[str, ...]

FALLBACK = (0.5, 1.0, 1.5)  # KenLM's discounts


@dataclass(frozen=True)
class NgramRun:
    target: tyro.conf.Positional[Path]  # .arpa or .arpa.gz
    texts: tuple[Path, ...]  # plain text, .jsonl, .csv, .tsv or tars
    text_column: str | None = None  # usual: text, transcription, transcript, sentence, captions ...
    order: Literal[1, 2, 3, 4, 5] = 3
    plain: bool = False  # lower case, no punctuation but the apostrophe
    overwrite: bool = False  # replace a file that this recipe did not write


class NgramEntry(NamedTuple):
    """`backoff`: share of the next word's probability that the shorter context gets."""

    probability: float
    backoff: float


def sentences(path: Path, columns: ListColumns, spelled: bool = False) -> Iterator[list[str]]:
    """Yield the words of each text; with `spelled` as `plain` writes them. Raises DataError, naming the line, for one
    that cannot be read or holds `<s>` or `</s>`."""
    unit = "text" if path.name.lower().endswith(TARS) or is_manifest(path) else "line"
    for number, text in enumerate(_texts(path, columns), 1):
        words = (plain(text) if spelled else text).split()
        if reserved := [word for word in words if word in (START, END)]:
            raise DataError(f"{path}: {unit} {number}: expected words, got {reserved[0]}, which marks a text's ends")
        if words:
            yield words


def _texts(path: Path, columns: ListColumns) -> Iterator[str]:
    if path.name.lower().endswith(TARS):
        trust = Trust()  # texts are inside the tar
        source = open_source(str(path), columns=columns, trust=trust)
        yield from (text for key in range(len(source)) for text in source.row(key).texts)
    elif not is_manifest(path):
        yield from read_text(path).split("\n")
    else:
        yield from listed_texts(path, columns)


def adjusted_counts(texts: Iterable[list[str]], order: int) -> list[Counter[Gram]]:
    """Count occurrences for the highest order; for the others, how many different words precede the n-gram, or how
    often it occurs if it starts a text, where no word precedes it."""
    counts: list[Counter[Gram]] = [Counter() for _ in range(order)]
    for words in texts:
        line = (START, *words, END)
        for size, own in enumerate(counts, 1):
            own.update(line[i : i + size] for i in range(size == 1, len(line) - size + 1))
    for size in range(1, order):
        before = Counter(gram[1:] for gram in counts[size])
        counts[size - 1] = Counter({g: n if g[0] == START else before[g] for g, n in counts[size - 1].items()})
    return counts


def discounts(counts: Counter[Gram]) -> tuple[float, float, float]:
    """Discounts of counts of 1, 2, and 3 or more; KenLM's fallback if there are too few of them."""
    n = Counter(counts.values())
    if not all(n[k] for k in (1, 2, 3)):  # as lmplz: without a count of 4 the last discount is 3
        return FALLBACK
    share = n[1] / (n[1] + 2 * n[2])
    values = tuple(k - (k + 1) * share * n[k + 1] / n[k] for k in (1, 2, 3))
    return values if all(0 <= value <= k for k, value in enumerate(values, 1)) else FALLBACK


def train(texts: Iterable[list[str]], order: int) -> list[dict[Gram, NgramEntry]]:
    """Estimate the n-grams of orders 1 to `order`. Raises DataError for texts without words."""
    counts = adjusted_counts(texts, order)
    if not counts[0]:
        raise DataError("--texts: no words in them")
    even = 1 / len({*counts[0], (UNKNOWN,)})  # <unk> is a word too, inside a text or not
    lower: dict[Gram, float] = {(): even}
    tables: list[dict[Gram, float]] = []
    shares: list[dict[Gram, float]] = []
    for own in counts:
        taken, totals, held = discounts(own), Counter(), Counter()
        for gram, count in own.items():
            totals[gram[:-1]] += count
            held[gram[:-1]] += taken[min(count, 3) - 1]
        shares.append({context: held[context] / total for context, total in totals.items()})
        table = {
            gram: (count - taken[min(count, 3) - 1]) / totals[gram[:-1]] + shares[-1][gram[:-1]] * lower[gram[1:]]
            for gram, count in own.items()
        }
        tables.append(table)
        lower = table
    tables[0] = {(UNKNOWN,): shares[0][()] * even} | tables[0] | {(START,): 0.0}
    return [
        {gram: NgramEntry(value, after.get(gram, 1.0)) for gram, value in table.items()}
        for table, after in zip(tables, [*shares[1:], {}], strict=True)
    ]


def arpa(tables: list[dict[Gram, NgramEntry]]) -> Iterator[str]:
    """Yield the lines of an ARPA file."""
    yield "\\data\\"
    yield from (f"ngram {order}={len(table)}" for order, table in enumerate(tables, 1))
    for order, table in enumerate(tables, 1):
        yield from ("", f"\\{order}-grams:")
        for gram, (probability, share) in sorted(table.items()):
            line = f"{math.log10(probability) if probability else -99:.7g}\t{' '.join(gram)}"
            yield line if order == len(tables) else f"{line}\t{math.log10(share):.7g}"
    yield from ("", "\\end\\")


def main(s: NgramRun) -> None:
    if not s.target.name.endswith((".arpa", ".arpa.gz")):
        raise UsageError(f"{s.target}: must end in .arpa or .arpa.gz")
    Outputs(s.texts, s.overwrite).claim(s.target)
    columns = ListColumns(text_column=s.text_column)
    tables = train((words for path in s.texts for words in sentences(path, columns, s.plain)), s.order)
    data = "".join(f"{line}\n" for line in arpa(tables)).encode()
    write_output(s.target, gzip.compress(data, mtime=0) if s.target.suffix == ".gz" else data)
    print(f"{s.target}: {', '.join(f'{len(t):,} {n}-grams' for n, t in enumerate(tables, 1))}")


if __name__ == "__main__":
    start(main)
