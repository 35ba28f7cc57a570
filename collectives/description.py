"""What every collective says of itself."""

from __future__ import annotations

__all__ = ["Described"]


class Described:
    """A collective with a `repr` in one line, which cannot be copied.

    A class names the settings in that line in `_shown`.
    """

    _shown: tuple[str, ...] = ()

    def __repr__(self):
        settings = "".join(f", {name}={getattr(self, name)!r}" for name in self._shown)
        state = "closed" if self.closed else "open"
        return (
            f"{type(self).__name__}({self.size} ranks{settings}, version={self.version}, {state})"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it holds a "
            "communicator: make one on every rank"
        )
