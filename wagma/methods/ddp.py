"""torch's DistributedDataParallel, for comparisons."""

from wagma.methods.method import Method

METHOD = Method(
    "ddp",
    "torch's DistributedDataParallel, over gloo or nccl: gradients, at every step",
    optimizer="wagma.references.DDP",
    simulated="wagma.simulation.methods.allreduce",
    color="#777777",
)
