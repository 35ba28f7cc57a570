"""What happens next: one state machine for each protocol, without MPI, clock or threads.

A protocol is told of events by method calls, and what is to be done about them stands in its
public attributes. The modules are plain Python; the ``.pxd`` beside each gives the types with which
it is also compiled, so that the engine runs the very same source without the GIL.
"""
