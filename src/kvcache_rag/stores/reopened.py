"""How what is open is copied and sent: a copy is itself, a pickle opens it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class Reopened:
    """Pickled as the arguments that it was opened with.

    Locks, threads and connections cannot be sent, and what is kept in memory alone stays where it
    is.  In this process a second one would only be less, so a copy is the same object.
    """

    _opened: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        self = super().__new__(cls)
        self._opened = arguments, options
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (type(self), *self._opened)


def _open(kind: type[Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kind(*arguments, **options)
