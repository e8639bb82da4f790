"""A folder on disk that belongs to one living process, and goes when the process has gone.

LMCache's disk tier keeps its index in memory: after a restart nobody would read the old files, nobody would count them
against the budget, and two servers on one folder would overwrite each other's. So each store gets a folder of its own,
guarded by a lock that the operating system drops when the process ends, however it ends.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

_PREFIX = "kvcmas-"
_LOCK = ".lock"


class DiskFolder:
    """Makes the folder under ``parent``, after removing those of processes that have ended.

    Raises:
        OSError: ``parent`` cannot be written, or its file system has no locks.
    """

    def __init__(self, parent: str) -> None:
        Path(parent).mkdir(parents=True, exist_ok=True)
        for lock in Path(parent).glob(f"{_PREFIX}*{_LOCK}"):
            _remove_if_abandoned(lock)
        while True:
            lock = Path(parent) / f"{_PREFIX}{secrets.token_hex(6)}{_LOCK}"
            self._file = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.exists():
                    break
            # Another process, cleaning up, came between the two lines: this name is gone.
            os.close(self._file)
        self._lock = lock
        self.path = lock.with_suffix("")
        self.path.mkdir()

    def close(self) -> None:
        """Removes the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock.unlink()
        with contextlib.suppress(OSError):
            os.close(self._file)


def _remove_if_abandoned(lock: Path) -> None:
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # its owner lives
    else:
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        with contextlib.suppress(OSError):
            lock.unlink()
    finally:
        os.close(file)
