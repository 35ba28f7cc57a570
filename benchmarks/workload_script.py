"""What `workloads_wall.py` trains on each rank, by `wagma compare --script`."""

import os

from workloads import WORKLOADS

task = WORKLOADS[os.environ["WORKLOAD"]].task()
model, data, loss, metrics, work = task.model, task.data, task.loss, task.metrics, task.work
