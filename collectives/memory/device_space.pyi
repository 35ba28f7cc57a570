from typing import Any

from collectives.memory.device_queue import DeviceQueue

class DeviceSpace:
    def __init__(self, dtypes: Any, sent: Any, queue: DeviceQueue, block: int = ...) -> None: ...
