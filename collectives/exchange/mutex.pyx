"""The mutex around the engine's MPI calls."""

pthread_mutex_init(&mpi_mutex, NULL)
