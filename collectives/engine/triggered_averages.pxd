from collectives.engine.collective cimport NativeCollective
from collectives.engine.calls cimport OTHER_WISHES
from collectives.engine.control_tree cimport ControlTree
from collectives.protocols.triggered_average cimport (
    HeldContribution,
    TriggeredAverageProtocol,
    TriggeredRankProtocol,
)

cdef enum:
    # What the application requests, besides CALL: a call, but only if it averages nothing.
    PASS_BY = OTHER_WISHES

cdef class TriggerTree(ControlTree):
    cdef TriggeredAverageProtocol triggering

cdef class TriggeredAverages(NativeCollective):
    # The same objects as `steps` and `contribution`.
    cdef TriggeredRankProtocol deciding
    cdef HeldContribution held
