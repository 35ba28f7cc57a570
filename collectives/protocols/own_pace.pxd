from collectives.protocols.wait_avoiding cimport RUNNING, WaitAvoidingProtocol

cdef class OwnPaceProtocol(WaitAvoidingProtocol):
    pass
