"""Folders that transformers loads."""
