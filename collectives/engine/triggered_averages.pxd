from collectives.engine.all_ranks cimport AllRanks
from collectives.engine.control_tree cimport ControlTree
from collectives.protocols.triggered_average cimport HeldContribution, TriggeredAverageProtocol

cdef class TriggerTree(ControlTree):
    cdef TriggeredAverageProtocol triggering

cdef class TriggeredAverages(AllRanks):
    # `protocol` and `contribution`.
    cdef TriggeredAverageProtocol triggering
    cdef HeldContribution held
    # The last call has averaged with nobody.
    cdef bint alone
