"""Follows a metrics.jsonl that grows, reading only what is new."""

import os
from pathlib import Path
from typing import Any, BinaryIO

from megatron_p3o.errors import InputError
from megatron_p3o.run_dir import parse_record


class MetricsFollower:
    """Lines of a metrics.jsonl as they come.

    A resumed run writes the file again up to its checkpoint and goes on from there. That shows in a
    file that is another one, is shorter, or no longer has the last line that was read where it was;
    all records are then read again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._inode: int | None = None
        self._last_line = b""
        self._end = 0  # first byte that has not been read
        self._num_lines = 0

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The new complete lines, and whether they replace all earlier ones.

        Both are empty or False while the file is missing. A half-written last line waits for its
        rest.

        Raises:
            InputError: the file cannot be read, or a complete line is no JSON object with a step.
        """
        try:
            with self._path.open("rb") as file:
                replaced = self._is_replaced(file)
                if replaced:
                    self._forget()
                self._inode = os.fstat(file.fileno()).st_ino
                return self._read_new(file), replaced
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise InputError(
                f"{str(self._path)!r} cannot be read ({error.strerror}); give a run dir whose "
                "files you may read"
            ) from error

    def _is_replaced(self, file: BinaryIO) -> bool:
        if self._inode is None or not self._end:
            return False
        if os.fstat(file.fileno()).st_ino != self._inode:
            return True
        file.seek(self._end - len(self._last_line))
        return file.read(len(self._last_line)) != self._last_line

    def _read_new(self, file: BinaryIO) -> list[dict[str, Any]]:
        file.seek(self._end)
        records = []
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._end += len(line)
            self._last_line = line
            self._num_lines += 1
            record = parse_record(line)
            if record is None:
                raise InputError(
                    f"{str(self._path)!r}, line {self._num_lines}: not a JSON object with a step; "
                    "the file was damaged, so copy it again or remove the line"
                )
            records.append(record)
        return records
