from wagma.simulation.core import Method

class TriggeredAveraging(Method):
    def __init__(self, sync_period: int, nbytes: int) -> None: ...
