cdef bint copy_from(int process, char *to, const char *source, Py_ssize_t size) noexcept nogil
cdef bint copy_to(int process, char *to, const char *source, Py_ssize_t size) noexcept nogil
