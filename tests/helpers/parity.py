"""Largest difference from the reference library in this run, per family and output."""

TABLE: dict[tuple[str, str], float] = {}


def record(family: str, output: str, difference: float) -> None:
    """Keep the largest difference."""
    TABLE[family, output] = max(difference, TABLE.get((family, output), 0.0))
