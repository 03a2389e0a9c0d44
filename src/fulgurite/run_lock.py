"""Keep two processes from training in one run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import IO

from fulgurite.console import note
from fulgurite.errors import UserError

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class RunLock:
    """Hold a run folder for this process.

    The operating system gives the lock up when the process ends, however it ends, so that a killed run leaves none behind.
    It is a POSIX record lock: a forked loader worker that outlives its parent by seconds does not hold it, as it would
    hold a lock by flock(), and NFS knows it.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, run: Path) -> None:
        """Take the lock.

        Raises:
            UserError: if another process has it
        """
        self.release()
        path = run / "run.lock"
        while self._file is None or not _is_at(path, self._file):  # whoever had it has removed the file since it was opened
            if self._file is not None:
                self._file.close()
            self._file = path.open("a+", encoding="utf-8")
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    note("warning", f"{run} cannot be locked on this file system: nothing keeps a second process out of it")
                    return
                self._file.seek(0)
                holder = self._file.read().strip()
                self._file.close()
                self._file = None
                raise UserError(f"{run} is in use{holder and f' by {holder}'}\nit can be resumed when that has ended") from None
        with suppress(OSError):  # a full disk: the name is for people only
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {platform.node()}\n")
            self._file.flush()

    def release(self) -> None:
        """Give the lock up."""
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()
            self._file = None


def _is_at(path: Path, file: IO[str]) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
