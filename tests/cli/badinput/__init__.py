"""Tables of bad input: commands run in one process, each row with the exact error lines expected.

Drop in a module with a list `ROWS` of `Row`; `test_tables.py` finds it. A row:

    Row("empty image", "classify bad.png red.png --labels a,b -m {clip} --format csv",
        lambda: Path("bad.png").touch(), ["bad.png: empty file"], facts=prints("red.png"))

- The command runs in a fresh folder that holds `red.png`, `tone.wav` and `out/`; `../outside/` lies beside it.
- `{clip} {asr} {captioner} {lm} {encoder} {translator}` are tiny checkpoint folders; `{copy:clip}` is a copy to
  damage, at `./clip`. Shipped models go by name. Arguments that a shell line cannot hold: give a list instead.
- `make` writes the bad files into the working folder. `errors`: one entry for each line on stderr, in order: a str is
  the whole line after "multimodal: error: " (or the whole line), a compiled pattern is searched for in the line.
- `code` is 1 where there are errors, else 0. `facts(run)` asserts more on run.code, .out, .err, .lines.
- Beside the row's own facts, nothing outside `out/` may appear, change or go; name what may in `writes`.
"""
