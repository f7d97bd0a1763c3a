"""The simplest servers of other libraries, each a process of its own: `python -m benchmarks.serve.apps.NAME`."""
