from mpi4py.libmpi cimport MPI_Comm, MPI_Datatype, MPI_Request
from mpi4py.MPI cimport Comm

from collectives._vectors cimport Layout
from collectives.protocols.peers cimport Peers, Port

cdef struct Letter:
    # A header, and the vector if it has one.
    char *memory
    bint holds_vector
    # Of one that comes: from whom, and whether all of it is there.
    int source
    bint complete
    # Of one that is sent: how many sends are under way, plus one while it is the last written.
    int uses
    Letter *next

cdef struct Letters:
    Letter *first
    Letter *last

cdef class Mailbox(Port):
    cdef readonly Peers protocol
    cdef readonly Layout layout
    cdef readonly long long moves, bytes_sent, nonfinite
    cdef int error
    cdef Comm communicator
    cdef MPI_Comm comm
    cdef MPI_Datatype line
    cdef int size
    # How often all ranks have begun anew: letters from before are of no use.
    cdef long long epoch
    # The model; what the application last got, and from its call on what it changed of that.
    cdef char *model
    cdef char *change
    cdef char **model_arrays
    cdef char **change_arrays
    cdef char **letter_arrays
    # The application's arrays, NULL where it is in no call; whether its change counts; whether it
    # does not know what it last got, since an exception ended its call.
    cdef char **user
    cdef bint changed, unreturned
    # The model is still what the application last got.
    cdef bint untouched
    # Letters without and with a vector that are not in use; those on their way here, in the order
    # in which their sources sent them; and those that the protocol keeps.
    cdef Letters free_short, free_long, coming, kept
    cdef Letter *written
    # What is under way: requests, and each one's letter.
    cdef MPI_Request *requests
    cdef Letter **carried
    cdef int *indices
    cdef int count, room
    # For each rank: how many letters were sent to it; and at the end, how many it has sent here.
    cdef long long *posted
    cdef long long *expected
    cdef long long received
    cdef MPI_Request gather
    cdef bint ending

    cdef bint progress(self) noexcept nogil
    cdef bint _receive(self) noexcept nogil
    cdef void _test(self) noexcept nogil
    cdef void _deliver(self) noexcept nogil
    cdef void _open(self, Letter *letter) noexcept nogil
    cdef bint _is_first_of_its_source(self, Letter *letter) noexcept nogil
    cdef Letter *_take_letter(self, bint holds_vector) noexcept nogil
    cdef void _recycle(self, Letter *letter) noexcept nogil
    cdef Letter *_kept_from(self, int source) noexcept nogil
    cdef bint _add_request(self, Letter *letter) noexcept nogil
    cdef void _send(self, Letter *letter, int destination) noexcept nogil
    cdef bint _begin_letter(
        self, int kind, long long number, double weight, bint holds_vector) noexcept nogil
    cdef void _scale(self, char **to, char **source, double scale) noexcept nogil
    cdef void begin_call(self, char **user) noexcept nogil
    cdef void take_in(self, char **user) noexcept nogil
    cdef void publish_change(self, char **user) noexcept nogil
    cdef void go_on_from(self, char **user) noexcept nogil
    cdef void forget_user(self) noexcept nogil
    cdef void restart(self, char **model, long long calls) noexcept nogil
    cdef void end(self) noexcept nogil
    cdef bint is_over(self) noexcept nogil
    cdef void free_type(self) noexcept nogil
    cdef void _check(self, int rc) noexcept nogil
