"""What all collectives have in common: how ranks make one, tell of failures, and close it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time

from collectives import device, process, settings
from collectives.agreement import raise_collectively, singleton_error
from collectives.description import Described
from collectives.errors import CollectiveError, CudaError
from collectives.meeting import meet
from collectives.node import Node
from collectives.statistics import Statistics

__all__ = ["Collective", "check_comm"]

BETWEEN_LOOKS = 1e-4  # seconds


class Collective(Described):
    """A collective of the ranks of a communicator; not for use by itself.

    A class says in `_allocate` how this rank's part is made.

    Attributes:
        comm, rank, size: the communicator given, this rank in it, and its number of ranks.
        engine: as given or by default.
        native: this rank's part, an `AllRanks` of the engine.
        path: how vectors are averaged: on the "host"; "staged", on the host by way of a copy of
            those on a device; or "direct", on the device. `path_reason`: a sentence.
    """

    # Whether vectors can be averaged on a device.
    _on_devices = False

    def _construct(self, comm, like, **given):
        """Agree with the other ranks on what is given, and build this rank's part; collective.

        Args:
            like: array or list of arrays, as they are averaged.
            given: the constructor's arguments, among them engine, transport, stall, abort and
                log_level.
        """
        check_comm(comm)
        native, error = _native()
        process.check_alone()
        given.setdefault("device", "cpu")
        if device.is_on_device(like):
            given["device"] = "cuda"
            like, problem = device.adopt(self, like)
            error = error or problem
        given = settings.resolve(like, **given)
        where = f"the constructor of {type(self).__name__.lstrip('_')}"
        meet(comm, where, *settings.limits(given["stall"], given["abort"]))
        with process.interrupts_held():
            try:
                self._agree(comm, like, given, error)
                self._build(native, comm, like, given)
            except BaseException:
                process.release(self)
                raise

    def _agree(self, comm, like, given, error):
        """Raise, on all ranks alike, what is wrong with what any of them has given."""
        from mpi4py import MPI

        error = (
            error
            or singleton_error(MPI.COMM_WORLD.size)
            or self._argument_error(comm, given)
            or settings.first_error(like, given)
            or process.reserve(self, given["engine"])
        )
        raise_collectively(comm, error)
        raise_collectively(comm, settings.difference(comm, given))

    def _argument_error(self, comm, given) -> Exception | None:
        """Return what is wrong with the arguments that only this class has."""
        return None

    def _build(self, native, comm, like, given):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.engine = given["engine"]
        settings.set_log_level(given["log_level"])
        node = Node(comm)
        self._communicators = comm.Dup(), comm.Dup()
        self._identity = comm.bcast(secrets.randbits(62))
        self.native = None
        try:
            self.path, self.path_reason = device.choose_path(self, comm, node, given)
            self._allocate(native, node, like, given)
            if self.path != "host":
                self._copies.forget_initial()
        except BaseException:
            self.native = None  # not kept by the exception's traceback
            for communicator in self._communicators:
                communicator.Free()
            raise
        finally:
            node.free()
        self.native.listen()
        process.add(self, self.engine)

    def _allocate(self, native, node, like, given):
        """Make this rank's part, or raise on all ranks; collective."""
        raise NotImplementedError

    def _common(self, node, like, given) -> dict:
        """Return what every rank's part is made of."""
        single = not isinstance(like, (list, tuple))
        direct = self.path == "direct"
        return {
            "control": self._communicators[0],
            "data": self._communicators[1],
            "like": [like] if single else list(like),
            "single": single,
            "identity": self._identity,
            "oversubscribed": node.oversubscribed,
            "stall": given["stall"],
            "abort": given["abort"],
            "make_space": self._copies.make_space if direct else None,
            "by_messages": not direct or self._copies.by_messages,
        }

    def _initial(self, like):
        """Return the initial vector where it is averaged: on a device, or else `like`."""
        return self._copies.arrays if self.path == "direct" else like

    def _share(self, node, asked, make) -> bool:
        """Make this rank's part, in memory that the ranks of its node share where they can.

        Args:
            asked: the transport that is asked for; None: whatever there is.
            make: function of whether memory is shared that makes `native`, and returns the error
                where it cannot.

        Returns:
            Whether memory is shared on this node.

        Raises:
            RuntimeError, MemoryError: it cannot be made so; on all ranks.
        """
        direct = self.path == "direct"
        sharing = asked != "messages" and len(node.ranks) > 1
        sharing = sharing and (not direct or self._copies.maps)
        raise_collectively(self.comm, make(sharing))
        error = node.share(self.native) if sharing else None
        if asked == "shared":
            why_not = error or node.elsewhere
            raise_collectively(
                self.comm, RuntimeError(f"transport: {why_not}") if why_not else None
            )
        if direct and not self._copies.by_messages:
            raise_collectively(self.comm, CudaError(error) if error else None)
        if any(self.comm.allgather(error is not None)):
            if error is not None:
                self.native, sharing = None, False
                error = make(sharing)
            raise_collectively(self.comm, error)
        return sharing

    def _load(self, vector, version):
        """Let all ranks go on from another version; collective."""
        error = settings.version_error(version)
        if error:
            self.fail(error)
            raise error
        self.native.load(vector, version)

    def statistics(self):
        """Return the `collectives.statistics.Statistics` of this rank so far."""
        return Statistics(*self.native.statistics())

    def fail(self, error):
        """Tell all ranks of this one's error: their calls raise it, and only close() is left."""
        if self._is_ours() and not (self.closed or self.native.broken):
            self.native.fail(process.describe(error))

    @contextlib.contextmanager
    def failing_collectively(self):
        """Tell all ranks of an error in the block, unless it is one that all are told of."""
        try:
            yield
        except CollectiveError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    @contextlib.contextmanager
    def joining(self, vector):
        """Begin to join, and wait for the others only at the end of the block.

        `vector` belongs to the collective inside, and after an exception there until `close`, which
        completes what was begun. See `collectives.join`.
        """
        call = self.native.start_join(vector)
        yield
        call.wait()

    def close(self):
        """Leave, once nothing is under way any more; collective. Closing twice does nothing."""
        if not self._is_ours():
            return
        self.native.close()
        with process.interrupts_held():
            if process.remove(self):
                self._let_go()
                for communicator in self._communicators:
                    communicator.Free()

    def _let_go(self):
        """Use no other rank's memory on devices from here on, which each may free then; collective.

        All ranks are about to come here, if they have not yet.
        """
        if self.path == "direct" and self._copies.maps:
            self.native.unmap()
            all_have = self._communicators[0].Ibarrier()
            while not all_have.Test():
                time.sleep(BETWEEN_LOOKS)

    @property
    def transport(self) -> str:
        """ "shared" where this rank shares memory with any other one, else "messages"."""
        return "shared" if self.native.shares else "messages"

    @property
    def closed(self):
        """Whether this collective has been closed."""
        return self.native.closed

    @property
    def version(self):
        """The version of the next call: how many calls this rank has made."""
        return self.native.version

    def _is_ours(self):
        """Whether this process made the collective, and no fork of it."""
        return self.native.pid == os.getpid()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if _is_failure(error) and self.size > 1 and not self.closed and self._is_ours():
            # Closing waits for the other ranks, and the interpreter prints only after that.
            process.tell(error, self.rank)
            process.fail(error)
        self.close()


def _is_failure(error) -> bool:
    """Whether a block that ends by this ends badly; sys.exit(0) and a generator's end do not."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def _native():
    """Return the engine's module, or None and the error of a rank that cannot load it."""
    try:
        return process.native(), None
    except ImportError as error:
        return None, error


def check_comm(comm):
    """Raise for what is no communicator to work on; ranks cannot meet there to raise together."""
    from mpi4py import MPI

    process.check_not_forked()
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalized: collectives must be made before that")
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this process is not in the communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is of type {type(comm).__name__}, not an mpi4py intracommunicator")
