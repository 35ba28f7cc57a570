from wagma.simulation.core import Method

class GroupAveraging(Method):
    def __init__(
        self,
        group_size: int,
        sync_period: int,
        nbytes: int,
        wait: str = "nobody",
        doubling: bool = False,
        drawing: bool = False,
        synchronous_averages: int = 1,
        fixed: bool = False,
        overlap: bool = False,
        late: str = "paper",
    ) -> None: ...
