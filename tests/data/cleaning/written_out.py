"""C4's rules written out, with strings in place of keys and all pages at once: the reference of `multimodal clean`."""

import random
import re

TERMINAL, CLOSING = '.!?"”»', "\"'”’»)]"
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def split(line: str) -> list[str]:
    parts, start, at = [], 0, 0
    while at < len(line):
        at += 1
        if line[at - 1] not in ".!?…":
            continue
        while at < len(line) and line[at] in CLOSING:
            at += 1
        after = at
        while after < len(line) and line[after].isspace():
            after += 1
        if at < after < len(line) and not "a" <= line[after] <= "z":
            parts.append(line[start:after])
            start = at = after
    return [*parts, line[start:]]


def line_rule(line: str) -> str:
    if not line or line[-1] not in TERMINAL:
        return "punctuation"
    if len(line.split()) < 5:
        return "words"
    if "javascript" in line.lower():
        return "javascript"
    return "policy" if any(phrase in line.lower() for phrase in POLICY) else ""


def page_rule(text: str, bad: list[str]) -> str:
    if "{" in text or "}" in text:
        return "curly_brackets"
    if "lorem ipsum" in text.lower():
        return "lorem_ipsum"
    found = any(re.search(rf"(^|\W){re.escape(word)}($|\W)", text.lower()) for word in bad)
    return "bad_words" if found else ""


def removed(parts: list[tuple[int, str]], seen: dict[tuple, list]) -> dict[int, object]:
    """Number of each sentence that goes, with where its first copy is: (page, line), or a line of this page."""
    left, gone = list(range(len(parts))), {}
    while True:
        now, own = {}, {}
        for at in range(len(left) - 2):
            span = tuple(parts[left[at + step]][1].lower().strip() for step in range(3))
            for step in range(3):
                if span in seen:
                    now.setdefault(left[at + step], seen[span][step])
                elif own.setdefault(span, at) < at and at + step >= own[span] + 3:
                    now.setdefault(left[at + step], parts[left[own[span] + step]][0])
        if not now:
            return gone
        gone |= now
        left = [number for number in left if number not in now]


def clean(pages: list[str], bad: list[str]) -> tuple[list[list[str]], list[tuple]]:
    """Lines of each page that stays; (page, line, rule, first copy) of each line that does not, or loses sentences."""
    output, why, seen = [], [], {}
    for page, text in enumerate(pages, 1):
        rule = page_rule(text, bad)
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        kept = []
        for number, line in lines:
            line = re.sub(r"\[(\d*|edit|citation needed)\]", "", line, flags=re.I).strip()
            if cause := rule or line_rule(line):
                why.append((page, number, cause, None))
            else:
                kept.append((number, line))
        parts = [(number, part) for number, line in kept for part in split(line)]
        if len(parts) < 3:
            why += [(page, number, "sentences", None) for number, _ in kept]
            continue
        gone = {at: first if isinstance(first, tuple) else (page, first) for at, first in removed(parts, seen).items()}
        rest = [part for at, part in enumerate(parts) if at not in gone]
        written = []
        for number, line in kept:
            here = [at for at, part in enumerate(parts) if part[0] == number]
            lost = [at for at in here if at in gone]
            if lost:
                line = "".join(parts[at][1] for at in here if at not in gone).strip()
                why.append((page, number, "duplicates", gone[lost[0]]))
            if line and len(rest) < 3:
                why.append((page, number, "sentences", None))
            elif line:
                written.append(line)
        if written:
            output.append(written)
            for at in range(len(rest) - 2):
                span = tuple(part.lower().strip() for _, part in rest[at : at + 3])
                seen[span] = [(page, number) for number, _ in rest[at : at + 3]]
    return output, why


def made_pages(count: int, seed: int = 0) -> list[str]:
    """Pages in which every rule has work to do, and passages come again."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(300)] + ["Über", "e.g.", "[1]", "[edit]", "Mr."]

    def sentence() -> str:
        text = " ".join(draw.choice(words) for _ in range(draw.randint(1, 9))).capitalize()
        return text + draw.choice([".", ".", "!", "?", '."', "...", ".)", "", ". [citation needed]"])

    pool = [sentence() for _ in range(400)]
    passages = [[draw.choice(pool) for _ in range(draw.randint(3, 7))] for _ in range(150)]
    odd = ["", "  ", "Menu", "Enable JavaScript to see all of this.", "See our privacy policy for all of it.",
           "Lorem ipsum dolor sit amet, it says.", "for { } in it all, yes.", "a swearword it is, a bad one.",
           "two bad  words stand here in all.", "all of the bad words, here they are."]  # fmt: skip
    weights = [6, 3, 8, 4, 4, 1, 1, 1, 1, 1]

    def line() -> str:
        kind = draw.random()
        if kind < 0.2:
            return draw.choices(odd, weights)[0]
        if kind < 0.35:
            return draw.choice([" ", "  "]).join(draw.choice(passages)) + draw.choice(["", " ", "\r"])
        if kind < 0.45:
            return "\n".join(draw.choice(passages))
        return " ".join(sentence() if draw.random() < 0.7 else draw.choice(pool) for _ in range(draw.randint(1, 4)))

    return ["\n".join(line() for _ in range(draw.randint(0, 8))) for _ in range(count)]
