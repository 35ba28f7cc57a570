from collectives.memory.device_queue import DeviceQueue
from collectives.memory.handover import Handover
from collectives.memory.layout import DeviceVector, Layout

class InPlace(Handover):
    def __init__(self, layout: Layout, addresses: list[int], queue: DeviceQueue) -> None: ...
    @property
    def arrays(self) -> DeviceVector: ...
