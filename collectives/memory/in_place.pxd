from collectives.memory.device_queue cimport DeviceQueue
from collectives.memory.handover cimport Handover

cdef class InPlace(Handover):
    cdef DeviceQueue queue
