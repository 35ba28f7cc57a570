"""torch's PostLocalSGDOptimizer, for comparisons."""

from wagma.methods.method import Method
from wagma.methods.shared import SYNC_PERIOD

METHOD = Method(
    "post-local-sgd",
    "torch's PostLocalSGDOptimizer, over gloo or nccl: models, every --sync-period steps",
    optimizer="wagma.references.PostLocalSGD",
    simulated="wagma.simulation.methods.local_sgd",
    options=(SYNC_PERIOD,),
    color="#332288",
)
