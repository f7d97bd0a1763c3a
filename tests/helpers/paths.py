"""Folders of the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SHARED_DATA = ROOT.parent / "shared" / "data"  # real data beside the checkout; no part of it
