"""Ends this process when the one that started it is gone."""

import os
import threading
import time


def end_with_parent(parent_pid: int) -> None:
    """Watch from a background thread, and exit within about a second of the parent's end.

    Whatever the main thread does: it may hang, or wait for a process that is gone as well.

    Args:
        parent_pid: of the process that started this one.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
