"""The `--parity` table, and the fixture for data that lies beside the repository."""

import signal
from pathlib import Path

import parity
import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


# a shell that starts the tests with & has them ignore Ctrl-C, and the programs that they start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity", action="store_true", help="print the largest difference from each reference library")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.getoption("--parity"):
        terminalreporter.section("largest difference from the reference library (float32, CPU)")
        terminalreporter.write_line("| family | output | difference |\n|---|---|---:|")
        for (family, output), difference in sorted(parity.TABLE.items()):
            terminalreporter.write_line(f"| {family} | {output} | {difference:.1e} |")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data that is not part of the repository; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return SHARED_DATA
