from collectives.memory.allocation cimport Memory
from collectives.memory.driver cimport Address, Handle

cdef class DeviceMemory(Memory):
    cdef Handle current
    cdef int pid
    # Whether the memory is another process's.
    cdef bint mapped

    cdef int _allocate(self, Py_ssize_t size, Address *address) noexcept

cdef class ExportedMemory(DeviceMemory):
    cdef bytes name

cdef class MappedMemory(DeviceMemory):
    pass
