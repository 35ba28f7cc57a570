"""One state machine for each protocol, without MPI, a clock or threads.

A driver tells a protocol of events by method calls, and reads in its public attributes what to do
next. The modules are plain Python; the ``.pxd`` files give the types with which they are also
compiled, so that the engine runs the same source without the GIL.
"""
