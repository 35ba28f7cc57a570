"""The declaration of each method, and of torch's own methods, for comparisons.

A method's options are arguments of its averager's constructor, whose source says their defaults,
choices and help (`wagma.methods.signatures`); here is what it does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wagma.arguments import not_negative, positive, whole
from wagma.methods import checks
from wagma.methods.method import Method, Option
from wagma.methods.signatures import Lazy, described

DEFAULT = "wagma"
WAGMA, AD_PSGD = "wagma.optim.wagma.WAGMA", "wagma.optim.adpsgd.ADPSGD"
PARTIAL_REDUCE = "wagma.optim.partial_reduce.PartialReduce"


def value(convert: Callable[[str], Any], metavar: str, **more: Any) -> dict[str, Any]:
    """Return how a value is converted and shown, with other arguments of an `Option`."""
    return {"convert": convert, "metavar": metavar, **more}


# What constructors do not say of an option, by its name, or by its method's and its own; "of" is
# the class that describes it, if not the method's.
UNSAID: dict[str, dict[str, Any]] = {
    "group_size": value(
        whole(1),
        "S",
        of=WAGMA,
        otherwise="3; for wagma the square root of the number of ranks, rounded up to a power of "
        "two",
        problem=checks.larger_than_the_job,
    ),
    "sync_period": value(whole(1), "STEPS", of=WAGMA),
    "sync_every": value(whole(1), "STEPS", of=PARTIAL_REDUCE),
    "controller_rank": value(
        whole(0), "R", of=PARTIAL_REDUCE, simulated=False, problem=checks.outside_the_job
    ),
    "controller_only": {"of": PARTIAL_REDUCE, "simulated": False, "problem": checks.nobody_left},
    "wire_dtype": {"of": WAGMA, "simulated": False},
    "transport": {
        "help": "how the ranks of a node exchange models: in shared memory, or by messages",
        "choices": ("shared", "messages"),
        "otherwise": "shared where possible",
        "simulated": False,
    },
    "graph": value(
        checks.graph_name,
        "NAME",
        help="graph of the ranks: ring, ring-based, double-ring, or hierarchical-4+2+2 for "
        "machines with 4, 2 and 2 ranks; -gateways-2 may follow",
        problem=checks.no_such_graph,
    ),
    "weights": {"simulated": False},
    "local-sgd:weights": {"of": WAGMA},
    "contraction": value(checks.between_0_and_1, "R", of=WAGMA, simulated=False),
    "average_state": {"of": AD_PSGD, "simulated": False},
    "wagma:average_state": value(
        checks.period, "N|all-ranks", of=WAGMA, otherwise="off", switch=True
    ),
    "correction": {"of": WAGMA, "simulated": False},
    "correction_every": {
        "choices": ("1", "all-ranks"),
        "convert": checks.period,
        "simulated": False,
    },
    "correction_period": value(whole(1), "STEPS", simulated=False),
    "compute_limit": value(positive, "SECONDS"),
    "d-psgd:graph": {"default": "ring", "otherwise": ""},
    "neighbors": value(whole(1), "N", problem=checks.too_many),
    "backups": value(whole(0), "B", problem=checks.none_left),
    "max_age": value(whole(1), "R"),
    "local_steps": value(checks.one_or_each(1), "H|H0+H1+…"),
    "outer_momentum": value(checks.below_1, "B"),
    "outer_rate": value(not_negative, "E"),
    "alpha": value(checks.below_1, "A", simulated=False),
    "missing": {"simulated": False},
    "history": value(whole(1), "T"),
    "threshold": value(whole(1), "C"),
    "ranks_per_node": value(whole(1), "N"),
    "max_gap": value(checks.gap, "N|auto|none"),
    "backup": value(checks.one_or_each(0), "B|B0+B1+…"),
    "staleness": value(whole(0), "S"),
    "max_skip": value(whole(0), "N"),
    "skip_trigger": value(whole(0), "N", default=1),
}


def option(method: str, averager: str, name: str) -> Option:
    """Return an option, of its class's constructor and of what that does not say."""
    unsaid = UNSAID.get(name, {}) | UNSAID.get(f"{method}:{name}", {})
    said = described(unsaid.pop("of", averager)).get(name, {})
    return Option(name, **(said | unsaid))


def derived(method: str, averager: str, names: str) -> Lazy:
    """Return the options of these names; classes are read when one is asked for."""
    return Lazy(partial(map, partial(option, method, averager), names.split()))


def declare(
    name: str, help: str, averager: str, simulated: str, options: str, **more: Any
) -> Method:
    """Return a method with the options of these names."""
    read = derived(name, averager, options)
    return Method(name, help, averager, f"wagma.simulation.{simulated}", read, **more)


# Options that commands also accept for all methods that have them at once.
SHARED = derived(
    "",
    WAGMA,
    "group_size sync_period sync_every controller_rank controller_only wire_dtype transport",
)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        declare(
            "wagma",
            "models in changing groups, without waiting for stragglers; over all ranks every "
            "--sync-period steps",
            WAGMA,
            "methods.wagma",
            "group_size sync_period groups pace wait late overlap average_state correction "
            "correction_every weights contraction wire_dtype transport",
            color="#D55E00",
        ),
        declare(
            "allreduce",
            "gradients over all ranks, at every step",
            "wagma.optim.allreduce.Allreduce",
            "methods.allreduce",
            "compute_limit transport",
            color="#000000",
        ),
        declare(
            "local-sgd",
            "models over all ranks, every --sync-period steps",
            "wagma.optim.local_sgd.LocalSGD",
            "methods.local_sgd",
            "sync_period trigger average_state correction weights contraction wire_dtype transport",
            color="#0072B2",
        ),
        declare(
            "eager-sgd",
            "gradients over all ranks, at every step, without waiting for stragglers; models, "
            "every --sync-period steps",
            "wagma.optim.eager_sgd.EagerSGD",
            "methods.eager_sgd",
            "trigger sync_period transport",
            color="#CC79A7",
        ),
        declare(
            "d-psgd",
            "models with the neighbors in a graph",
            "wagma.optim.dpsgd.DPSGD",
            "peer_methods.d_psgd",
            "graph clock transport",
            color="#009E73",
        ),
        declare(
            "sgp",
            "shares of models, pushed to different ranks at every step",
            "wagma.optim.sgp.SGP",
            "peer_methods.sgp",
            "neighbors transport",
            color="#56B4E9",
        ),
        declare(
            "ad-psgd",
            "models of random pairs, in the background; no rank waits",
            AD_PSGD,
            "peer_methods.ad_psgd",
            "graph average_state correction correction_period transport",
            color="#E69F00",
            seeded=True,
        ),
        declare(
            "parameter-server",
            "updates, into one model on rank 0",
            "wagma.optim.parameter_server.ParameterServer",
            "peer_methods.parameter_server",
            "mode backups max_age local_steps dynamic_steps outer_momentum outer_rate transport",
            color="#882255",
            combination=checks.parameter_server,
        ),
        declare(
            "partial-reduce",
            "models in groups of the ranks that are ready first",
            PARTIAL_REDUCE,
            "partial_reduce.partial_reduce",
            "weights alpha missing history group_size sync_every controller_rank controller_only "
            "transport",
            color="#661100",
            combination=checks.partial_reduce,
        ),
        declare(
            "ripples",
            "models in groups that a generator makes at a rank's request; only members wait for "
            "each other",
            "wagma.optim.ripples.Ripples",
            "ripples.ripples",
            "groups threshold ranks_per_node group_size sync_every controller_rank "
            "controller_only transport",
            color="#117733",
            seeded=True,
            combination=checks.ripples,
        ),
        declare(
            "hop",
            "models with the neighbors in a graph, some of which may be late or several steps "
            "behind",
            "wagma.optim.hop.Hop",
            "peer_methods.hop",
            "graph max_gap backup staleness mean max_skip skip_trigger mode order transport",
            color="#44AA99",
            combination=checks.hop,
        ),
    )
}
REFERENCES: dict[str, Method] = {
    method.name: method
    for method in (
        declare(
            "ddp",
            "torch's DistributedDataParallel, over gloo or nccl: gradients, at every step",
            "wagma.references.DDP",
            "methods.allreduce",
            "",
            color="#777777",
        ),
        declare(
            "post-local-sgd",
            "torch's PostLocalSGDOptimizer, over gloo or nccl: models, every --sync-period steps",
            "wagma.references.PostLocalSGD",
            "methods.local_sgd",
            "sync_period",
            color="#332288",
        ),
    )
}
