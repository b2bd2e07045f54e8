"""Where packed blocks lie: in a local directory, or under s3://bucket/prefix.

Who may read and write there, and where the server is, the usual variables say: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION and AWS_ENDPOINT_URL are read by pyarrow, lance and
mosaicml-streaming alike.
"""

import os
from contextlib import suppress

from pyarrow import fs


class Store:
    """A directory or a file of either kind. Raises SystemExit for another kind of address.

    Object stores know no directories, and nothing in them can be renamed.
    """

    def __init__(self, where: str | os.PathLike, flag: str) -> None:
        where = os.fspath(where)
        self.remote, self.flag = "://" in where, flag
        self.where = where if where.endswith("//") else where.rstrip("/") or "/"
        if not self.remote:
            self.files, self.path = fs.LocalFileSystem(), self.where
            return
        try:
            if not self.where.startswith("s3://") or self.where == "s3://":
                raise ValueError("give a local directory or s3://bucket/prefix")
            self.files, self.path = fs.FileSystem.from_uri(self.where)
        except (OSError, ValueError) as error:
            raise SystemExit(f"{flag} {self.where}: {error}") from None

    def __truediv__(self, name: str) -> "Store":
        return Store(f"{self.where.rstrip('/')}/{name}", self.flag)

    def __str__(self) -> str:
        return self.where

    def __fspath__(self) -> str:
        if self.remote:
            raise TypeError(f"{self.where} is not a local path")
        return self.where

    def exists(self) -> bool:
        return self.files.get_file_info(self.path).type != fs.FileType.NotFound

    def make(self) -> None:
        """The directory, where there are directories."""
        if not self.remote:
            self.files.create_dir(self.path)

    def read(self) -> bytes:
        with self.files.open_input_stream(self.path) as file:
            return file.read()

    def write(self, data: bytes) -> None:
        with self.files.open_output_stream(self.path) as file:
            file.write(data)

    def size(self) -> int:
        """Bytes of all files below."""
        below = fs.FileSelector(self.path, recursive=True)
        return sum(file.size for file in self.files.get_file_info(below) if file.is_file)

    def remove(self) -> None:
        """The directory and all below, if it is there."""
        with suppress(FileNotFoundError):
            self.files.delete_dir(self.path)

    def become(self, other: "Store") -> None:
        """Rename to ``other``: local ones only. A file there is replaced."""
        self.files.move(self.path, other.path)


def lance_options() -> dict[str, str] | None:
    """What Lance wants to be told beside the variables: that no TLS is meant by http://."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {"allow_http": "true"} if plain else None
