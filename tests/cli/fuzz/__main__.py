"""The command; its options are in the package's docstring."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from .fuzz import KINDS, LIGHT, Fuzz, campaign, new_seed, warm  # noqa: E402


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.cli.fuzz", description="Mutated real files against the commands.")
    p.add_argument("--minutes", type=float, default=0)
    p.add_argument("--seconds", type=float, default=0)
    p.add_argument("--inputs", type=int, default=1 << 60, help="at most so many")
    p.add_argument("--light", action="store_true", help="only the kinds that need no other library")
    p.add_argument("--seed", type=int, help="of all inputs (default: another each time, printed)")
    p.add_argument("--only", choices=list(KINDS), nargs="+", default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    p.add_argument("--case", metavar="KIND:SEED", help="one input again")
    p.add_argument("--kept", type=Path, default=Path("fuzz-findings"), help="folder of what is found")
    options = p.parse_args()
    kept = options.kept.resolve()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this with & has it ignored
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        fuzz = Fuzz(Path(root), kept)
        warm(fuzz)
        if options.case:
            kind, _, seed = options.case.partition(":")
            found, case, ended = fuzz.one(kind, seed)
            print(case.command, ended.err, ended.out[:2000], *(f"FOUND {problem}" for problem in found), sep="\n")
            fuzz._keep(kind, seed, "", case, ended, kept / f"{kind}-{seed.replace(':', '-')}")
            return int(bool(found))
        seed = new_seed() if options.seed is None else options.seed
        print(f"seed {seed}", flush=True)
        seconds = 60 * options.minutes + options.seconds or (60 if options.inputs == 1 << 60 else 3600)
        report = campaign(fuzz, LIGHT if options.light else options.only, seed, seconds, options.inputs)
        print(*report.lines(), sep="\n")
        os.chdir(kept.parent)
    return int(bool(report.findings))


sys.exit(main())
