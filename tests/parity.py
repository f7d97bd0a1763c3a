"""The largest difference from the reference library met in this run, per family and output."""

TABLE: dict[tuple[str, str], float] = {}


def record(family: str, output: str, difference: float) -> None:
    """Keeps the largest difference seen."""
    TABLE[family, output] = max(difference, TABLE.get((family, output), 0.0))
