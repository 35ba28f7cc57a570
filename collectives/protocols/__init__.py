"""One state machine for each protocol, without MPI, a clock or threads.

A driver reports events to a protocol by method calls, and reads the next action from its public
attributes. The modules are plain Python; the ``.pxd`` files give the types with which they are also
compiled, so that the engine runs the same source without the GIL.
"""
