"""Benchmarks against peers, in separate processes that take turns: `python -m benchmarks run`."""
