# The communicators and tags of all messages, and why no two messages are confused.
#
# A collective duplicates the communicator it is given, so no message of the application's or of
# another collective is received. It has two duplicates, or three:
#
# control   The control tree: one receive for each of its dimensions, from one source each. On one
#           dimension all messages go from one rank to another, and MPI keeps their order, so they
#           need no tags: their first integer says what they are. The agreement's Iallgather is a
#           collective operation, which point-to-point messages are never matched with; a rank
#           begins the next one only after the one before.
# data      Exchanges of vectors, and questions with their answers.
# messages  Of collectives whose groups a protocol forms, and of exchanges between peers: messages
#           of the protocol, from any source, and the vectors of its groups, or of its messages.
#
# One exchange uses up to PHASES tags, from its first one on: a phase of recursive doubling each, or
# the parts, means and weights of slices. Within an exchange two ranks exchange the segments of a
# phase in the same order, so these need no tags of their own. Hence two exchanges are never
# confused if their first tags differ, if no two ranks are in both, or if all ranks that are in both
# execute them in the same order, one after the other.
#
# data, operations: all ranks execute them in the same order. A rank completes an operation only
#   once it has received all of its messages, so the messages of at most two are in transit between
#   two ranks: one whose last messages the other has yet to receive, and the next. Two tags do.
# data, versions: every rank executes them in order. Ranks of one group are at most one version
#   apart when they meet, but a rank may be ahead of one that it meets later, by as many versions as
#   it takes until every rank has met every other (`topology.propagation_bound`); in the versions
#   between it sends that rank nothing. Four times the bound, plus a margin, is more than two ranks
#   can be apart in both directions together. With groups of one rank nothing is sent.
# messages, groups: a rank's groups are averaged one after the other. Two ranks with several groups
#   in common average them in the same order: then even one tag would do. The window distinguishes
#   groups that failures have left incomplete.

from collectives.exchange.messages.doubling cimport PHASES

cimport cython

cdef enum:
    # On `control`: all messages of the tree; comparisons of clocks.
    TREE_TAG = 0
    CLOCK_TAG = 1
    # On `data`: a question and its answer; then operations, in turns, and versions.
    QUESTION_TAG = 0
    ANSWER_TAG = 1
    FIRST_OPERATION_TAG = 2
    OPERATIONS = 2
    FIRST_VERSION_TAG = FIRST_OPERATION_TAG + OPERATIONS * PHASES
    # On `messages`: those of the protocol; blocks of a vector that follow one; groups.
    MESSAGE_TAG = 0
    BLOCK_TAG = 1
    FIRST_GROUP_TAG = 1
    GROUPS = 64

cdef inline int operation_tag(long long number) noexcept nogil:
    """Return the first tag of an operation of all ranks."""
    return FIRST_OPERATION_TAG + <int>(number % OPERATIONS) * PHASES

cdef inline int versions_window(int bound) noexcept nogil:
    """Return how many versions have different tags, if ranks are at most `bound` versions apart."""
    return 4 * bound + 4

@cython.cdivision(False)  # tags are not negative, even if a version that is loaded is
cdef inline int version_tag(long long version, int window) noexcept nogil:
    """Return the first tag of a version's exchange."""
    return FIRST_VERSION_TAG + <int>(version % window) * PHASES

@cython.cdivision(False)  # neither if a user's protocol has negative numbers
cdef inline int group_tag(long long number) noexcept nogil:
    """Return the first tag of the exchange of a group with this number."""
    return FIRST_GROUP_TAG + <int>(number % GROUPS) * PHASES
