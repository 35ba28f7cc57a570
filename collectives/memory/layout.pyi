from collections.abc import Callable, Sequence
from typing import Any

class Layout:
    count: int
    size: int
    single: bool
    def __init__(
        self,
        dtypes: Sequence[str],
        lengths: Sequence[int],
        single: bool,
        make_space: Callable[..., Any] | None = None,
        by_value: Sequence[int] = (),
    ) -> None: ...

class DeviceVector:
    def __init__(self, addresses: list[int]) -> None: ...

class UserVector:
    def __init__(self, vector: Any, layout: Layout, flags: int) -> None: ...

class NotCopied:
    def __init__(self, vector: Any) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...
