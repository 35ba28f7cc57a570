import numpy as np
import numpy.typing as npt

from wagma.wpsgd.samples import Samples

LATEST: int

class Steps:
    consumed: int
    applied: int
    abandoned: int
    longest: int
    samples: Samples
    workers: int
    def __init__(
        self,
        samples: Samples,
        start: npt.NDArray[np.float64],
        learning_rate: float,
        regularization: float,
        *,
        logistic: bool = False,
        workers: int = 1,
        check: bool = False,
    ) -> None: ...
    @property
    def delays(self) -> npt.NDArray[np.int64]: ...
    def load(self, model: npt.NDArray[np.float64]) -> None: ...
    def model(self) -> npt.NDArray[np.float64]: ...
    def advance(self, rows: npt.NDArray[np.int64]) -> None: ...
    def advance_together(self, rows: npt.NDArray[np.int64]) -> None: ...
    def begin(self, rows: npt.NDArray[np.int64]) -> None: ...
    def stop(self) -> None: ...
    def work(self, worker: int, factor: float = 1.0, sample_seconds: float = 0.0) -> None: ...
