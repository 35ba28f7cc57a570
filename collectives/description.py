"""The representation of collectives as text."""

from __future__ import annotations

from typing import Any, NoReturn

from collectives.agreement import counted

__all__ = ["Described"]


class Described:
    """A collective's `repr`, one line with the settings in `_shown`; it cannot be copied."""

    _shown: tuple[str, ...] = ()

    size: int

    @property
    def closed(self) -> bool:
        """Whether this collective has been closed."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The version of the next call, which is the number of calls of this rank."""
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = "".join(f", {name}={getattr(self, name)!r}" for name in self._shown)
        state = "closed" if self.closed else "open"
        ranks = counted(self.size, "rank")
        return f"{type(self).__name__}({ranks}{settings}, version={self.version}, {state})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it holds a "
            "communicator: make one on every rank"
        )
