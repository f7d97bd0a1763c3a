"""Worker processes."""

import multiprocessing
import os
import signal
import threading
import time

PARENT = 0.5  # seconds between checks that a worker's parent lives


def end_with_parent() -> None:
    """End this process soon after its parent, even if that was killed."""
    signal.set_wakeup_fd(-1)  # inherited from the parent
    parent = multiprocessing.parent_process().pid

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT)
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="parent").start()
