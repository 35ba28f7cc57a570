cdef class SharedExchangePort:
    cdef int find_group(self, int rank, long long number, int *members) noexcept nogil
    cdef Py_ssize_t blocks(self, int size) noexcept nogil
    cdef void set_path(self, bint ringed, bint takes, bint shows, bint gets) noexcept nogil
    cdef long long begun(self) noexcept nogil
    cdef bint over(self, long long ticket) noexcept nogil
    cdef bint has_block(self, Py_ssize_t block) noexcept nogil
    cdef long long contribute_block(self, Py_ssize_t block) noexcept nogil
    cdef void return_block(self, Py_ssize_t block, bint in_place) noexcept nogil
    cdef void keep_arrays(self) noexcept nogil
    cdef void withdraw(self, Py_ssize_t averaged) noexcept nogil
    cdef double weigh(self, const int *members, int size) noexcept nogil
    cdef long long average(
        self, long long number, bint together, Py_ssize_t block, const int *members, int size,
        bint in_place
    ) noexcept nogil
    cdef double total_weight(self) noexcept nogil
    cdef bint end_part(self, int rank, double total) noexcept nogil
    cdef void average_counts(
        self, long long number, const int *members, int size) noexcept nogil
    cdef void replace(self, int rank) noexcept nogil
    cdef void progressed(self) noexcept nogil
