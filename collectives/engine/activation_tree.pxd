from collectives.engine.control_tree cimport ControlTree
from collectives.protocols.wait_avoiding cimport WaitAvoidingProtocol

cdef class ActivationTree(ControlTree):
    cdef WaitAvoidingProtocol versions
