"""A fuzz of everything that the commands read: real files, mutated, under limits, in forked children.

    python -m tests.cli.fuzz --minutes 60               # all kinds in turn; --seconds 60, --seed 7, --only image
    python -m tests.cli.fuzz --case image:7:123         # one input again, its files kept

The property: the command exits by itself with 0, 1 or 2 within its limits of processor time, wall time and memory; it
writes at most one error line for each bad item and no traceback; no file outside of its output folder appears, changes
or goes; no process is started, no address is connected to; the good file beside the bad one gets its usual result."""
