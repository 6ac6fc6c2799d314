"""A folder as a remote (`file://`): fsspec's own driver, for this user only and for files only."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Any

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # not typed

from kvcache_rag.stores.filesystem import NEW, check_folder, make_folder, open_file


class PrivateFiles(LocalFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """Files of mode 0600 in folders of mode 0700 below a root, whatever the umask.

    A link, a pipe, a socket or a device in place of a file is no object: it is neither opened nor
    followed, and a new object replaces it.  A link in place of a folder is refused.
    """

    def __init__(self, root: str, **options: Any) -> None:
        """Serve what lies below `root`; `options` are those of fsspec's driver."""
        super().__init__(**options)
        self._root = root

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and what is missing above it."""
        del exist_ok
        make_folder(self._root, path)

    def cat_file(self, path: str, **span: Any) -> Any:
        """The content of a file."""
        self._check(path)
        return super().cat_file(path, **span)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        """Write a file that is not there yet."""
        check_folder(self._root, os.path.dirname(path))
        os.close(open_file(path, NEW)[0])  # so it is nobody else's before its first byte
        super().pipe_file(path, value, **options)

    def mv(self, source: str, target: str, **options: Any) -> None:
        """Move a file into the place of another one."""
        check_folder(self._root, os.path.dirname(target))
        if os.path.islink(target):
            os.unlink(target)  # shutil moves a file into what a link leads to
        elif os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, "a folder is where a file belongs", target)
        super().mv(source, target, **options)

    def rm_file(self, path: str) -> None:
        """Remove a name; what a link leads to stays."""
        self._check_folders(path)
        super().rm_file(path)

    def info(self, path: str | os.DirEntry[str], **options: Any) -> Any:
        """What is known of a file or a folder itself."""
        if isinstance(path, str):
            self._check(path, is_file=False)
        return super().info(path, **options)

    def find(self, path: str, **options: Any) -> Any:
        """Everything below a folder."""
        with suppress(FileNotFoundError):
            check_folder(self._root, path)
        return super().find(path, **options)

    def _check(self, path: str, *, is_file: bool = True) -> None:
        """Refuse what is no file, or neither file nor folder; where nothing is, the driver says so.

        Raises:
            FileNotFoundError: As if there were nothing.
        """
        self._check_folders(path)
        if not os.path.lexists(path):
            return
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode) and (is_file or not stat.S_ISDIR(mode)):
            raise FileNotFoundError(errno.ENOENT, "there is something else than a file", path)

    def _check_folders(self, path: str) -> None:
        try:
            with suppress(FileNotFoundError):
                check_folder(self._root, os.path.dirname(path) if path != self._root else path)
        except NotADirectoryError as error:
            if not os.path.isdir(self._root):
                raise
            raise FileNotFoundError(errno.ENOENT, error.strerror, path) from None
