from collectives.engine.group_averages cimport GroupAverages
from collectives.memory.handover cimport Handover

cdef class FormedGroups(GroupAverages):
    cdef int _call_with(self, vector, Handover handover) except -1
