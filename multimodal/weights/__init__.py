"""Checkpoints of our own and of other libraries, read strictly."""
