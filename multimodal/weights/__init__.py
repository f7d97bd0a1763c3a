"""Weights: checkpoints of our own and of others to models, strictly."""
