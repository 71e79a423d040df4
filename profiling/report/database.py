"""The SQLite file that nsys exports: opened for reading, its tables and columns looked for.

The schema differs between versions of nsys, and tables are only there where there is something in
them; so no table and no column is taken for granted, and every query says its order, because that
of the rows is not promised. Standard library only.
"""

import contextlib
import shlex
import sqlite3
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

__all__ = ["ExportError", "Tables", "open_tables"]

_REPORT_SUFFIXES: Final = (".nsys-rep", ".qdrep", ".qdstrm")
_MAGIC: Final = b"SQLite format 3\0"


class ExportError(ValueError):
    """A file that is no export of nsys, or one that holds nothing to report."""


@contextlib.contextmanager
def open_tables(path: Path) -> Iterator["Tables"]:
    """Open an export for reading.

    Raises:
        ExportError: the file is missing, damaged or no SQLite file; or it turns out to be damaged
            while its tables are read.
    """
    _require_database(path)
    try:
        uri = path.absolute().as_uri() + "?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda text: text.decode("utf-8", "replace")
            yield Tables(connection, path)
    # A damaged schema may be quoted in the message of an error, which then is no UTF-8.
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error


def _require_database(path: Path) -> None:
    """Raise ExportError if `path` is no complete SQLite file."""
    if path.suffix in _REPORT_SUFFIXES:
        from ..nsys import export_command  # here: it loads nvtx

        command = shlex.join(export_command(path))
        raise ExportError(f"{path} is a report of nsys, not its export; export it first: {command}")
    try:
        with path.open("rb") as stream:
            header = stream.read(100)
        size = path.stat().st_size
    except OSError as error:
        raise ExportError(f"cannot read {path}: {error.strerror}") from error
    if not header.startswith(_MAGIC):
        what = "is empty" if not header else "is no SQLite file"
        raise ExportError(f"{path} {what}; an export of nsys is one (nsys export --type=sqlite)")
    if len(header) == 100:
        # The file format of SQLite, section 1.3: page size at 16 (1 means 65,536), pages at 28,
        # which are valid where the change counters at 24 and 92 agree.
        page_size, changes, pages = struct.unpack_from(">H6xII", header, 16)
        valid = changes == struct.unpack_from(">I", header, 92)[0]
        expected = pages * (65536 if page_size == 1 else page_size)
        if valid and size < expected:
            raise ExportError(f"{path} is truncated: {size:,} of {expected:,} bytes are there")


class Tables:
    """The tables of an open export.

    Attributes:
        path: of the file.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._connection = connection
        # No views: nsys makes none, and one may never come to an end.
        tables = self.query("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._columns: dict[str, frozenset[str]] = {}
        for (table,) in tables:
            quoted = str(table).replace('"', '""')
            rows = self.query(f'PRAGMA table_info("{quoted}")')
            self._columns[str(table)] = frozenset(str(row[1]) for row in rows)
        self._strings = self.texts("StringIds", "id", "value")

    def __contains__(self, table: str) -> bool:
        return table in self._columns

    def query(self, sql: str, values: Sequence[int] = ()) -> Iterator[tuple[Any, ...]]:
        """Return the rows of a query, one after the other: there may be millions."""
        return self._connection.execute(sql, values)

    def select(
        self,
        table: str,
        columns: Sequence[str],
        order: str,
        among: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> Iterator[tuple[Any, ...]]:
        """Return rows in an order; None in the place of columns that the table does not have.

        Args:
            table: its name; where there is none of it, there are no rows.
            columns: what a row is to hold.
            order: columns, the first the most significant, each with " DESC" behind it or not.
            among: columns, and what may stand in them; other rows are left out.
        """
        there = self._columns.get(table)
        if there is None or not there.issuperset(among):
            return iter(())
        wanted = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
        keys = ", ".join(f'"{name}" {way}'.rstrip() for name, way in _order(order) if name in there)
        tests = " AND ".join(f'"{name}" IN ({", ".join("?" * len(among[name]))})' for name in among)
        sql = f'SELECT {wanted} FROM "{table}"' + (f" WHERE {tests}" if tests else "")
        sql += f" ORDER BY {keys}" if keys else ""
        return self.query(sql, [value for values in among.values() for value in values])

    def texts(self, table: str, key: str, value: str) -> dict[int, str]:
        """Return a table of texts by their numbers."""
        rows = self.select(table, (key, value), key)
        return {number: str(text) for number, text in rows if isinstance(number, int)}

    def integer(self, value: Any, column: str) -> int:
        """Return a number of a column that needs one.

        Raises:
            ExportError: it is none.
        """
        if not isinstance(value, int):
            raise ExportError(f"{self.path} is damaged: {column} is {value!r}, no whole number")
        return value

    def text(self, text: Any, text_id: Any) -> str:
        """Return a message: registered ones are ids of strings, others stand in the row."""
        found = self._strings.get(text_id) if text_id is not None else None
        return found if found is not None else str(text) if text is not None else ""


def _order(order: str) -> Iterator[tuple[str, str]]:
    """The columns of an order, and the way of each."""
    for key in order.split(", "):
        name, _, way = key.partition(" ")
        yield name, way
