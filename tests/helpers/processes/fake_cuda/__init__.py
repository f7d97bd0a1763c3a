"""A pretended GPU: runs code for one on a machine without, and lists what would make the host wait for it.

    python -m tests.helpers.processes.fake_cuda [part of a scenario's name ...]

Prints a JSON line a scenario: what it raised, if anything, and each wait with its place and count. Needs a process of
its own, since it replaces functions of torch."""
