"""Ours beside its peers, in processes of their own and in turns: `python -m benchmarks run`."""
