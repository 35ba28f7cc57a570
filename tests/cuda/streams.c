/* Streams: each is a thread that carries out its operations one by one, late. */
#include "stand_in.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
Stream streams[MOST_STREAMS];
int stream_count;
long gates_closed, gates_opened, copies_let = -1;
int held;
static int removed[MOST_STREAMS];
static long delay, most; /* operations in a stream; 0: any number */
static int is_full;      /* a call waits for a place in a stream */

static long setting(const char *name) { return getenv(name) ? atol(getenv(name)) : 0; }
void read_settings(void) {
    delay = setting("STAND_IN_DELAY");
    most = setting("STAND_IN_QUEUE");
}

/* What a function of the driver's begins and ends with: it holds the lock meanwhile. None goes on
   while calls are held, and none begins while one waits for a place in a stream. */
void begin_call(void) {
    pthread_mutex_lock(&lock);
    while (held || is_full)
        pthread_cond_wait(&moved, &lock);
}

void end_call(void) {
    while (held)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

static void sleep_for(long microseconds) {
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static void carry_out(const Operation *operation) {
    if (operation->kind == COPY)
        memmove(reach(operation->to), reach(operation->from), operation->size);
    if (operation->kind == FILL)
        memset(reach(operation->to), operation->value, operation->size);
    if (operation->kind == LAUNCH)
        run_launch(operation->launch);
    if (operation->kind == SLEEP)
        sleep_for(operation->microseconds);
    if (operation->kind == CALL)
        operation->function(operation->argument);
}

static int may_begin(const Operation *operation) {
    for (int i = 0; operation && i < stream_count; i++)
        if (streams[i].ended < operation->after.of[i])
            return 0;
    if (!operation || held || (operation->kind == GATE && operation->gate > gates_opened))
        return 0;
    return !operation->to_host || copies_let != 0;
}

static void *serve(void *argument) {
    Stream *stream = argument;
    unsigned random = stream->number * 7919 + getpid();
    pthread_mutex_lock(&lock);
    for (;;) {
        Operation *operation = stream->first;
        if (!may_begin(operation)) {
            pthread_cond_wait(&moved, &lock);
            continue;
        }
        copies_let -= operation->to_host && copies_let > 0;
        pthread_mutex_unlock(&lock);
        if (delay)
            sleep_for(rand_r(&random) % delay);
        carry_out(operation);
        pthread_mutex_lock(&lock);
        if (operation->kind == NUMBER)
            write_number(operation);
        stream->first = operation->next;
        if (!stream->first)
            stream->last = NULL;
        stream->ended = operation->number;
        free(operation->launch);
        free(operation);
        pthread_cond_broadcast(&moved);
    }
    return NULL;
}

Stream *make_stream(int legacy) {
    for (int i = 0; i < stream_count; i++)
        if (removed[i]) {
            removed[i] = 0;
            streams[i].legacy = legacy;
            return &streams[i];
        }
    if (stream_count == MOST_STREAMS)
        return NULL;
    Stream *stream = &streams[stream_count];
    stream->number = stream_count++;
    stream->legacy = legacy;
    /* Signals are the application's. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    pthread_create(&stream->thread, NULL, serve, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return stream;
}

/* What is in it still runs; its thread serves a later stream. */
void remove_stream(Stream *stream) { removed[stream->number] = 1; }

/* Return the stream of a handle: NULL and CU_STREAM_LEGACY are the legacy default stream,
   CU_STREAM_PER_THREAD this thread's own. */
Stream *stream_of(void *handle) {
    static __thread Stream *own;
    if ((size_t)handle <= 1)
        return &streams[0];
    if ((size_t)handle == 2)
        return own ? own : (own = make_stream(1));
    Stream *stream = handle;
    if (stream < streams || stream >= streams + stream_count || removed[stream - streams])
        return NULL;
    return stream;
}

Operation *make_operation(int kind, const char *what) {
    Operation *operation = calloc(1, sizeof *operation);
    operation->kind = kind;
    operation->what = what;
    return operation;
}

static int wait_for_each_other(const Stream *a, const Stream *b) {
    return (a->number == 0 && b->legacy) || (b->number == 0 && a->legacy);
}

static void wait_for_place(const Stream *stream) {
    is_full = most && stream->issued - stream->ended >= (Number)most;
    while (is_full) {
        pthread_cond_wait(&moved, &lock);
        is_full = stream->issued - stream->ended >= (Number)most;
    }
    if (most)
        pthread_cond_broadcast(&moved);
}

/* Put an operation at a stream's end, once there is a place and it is known to be in order. */
void enqueue(Stream *stream, Operation *operation) {
    wait_for_place(stream);
    operation->number = ++stream->issued;
    Clock clock = stream->clock;
    merge(&clock, &host);
    for (int i = 0; i < stream_count; i++) {
        const Stream *other = &streams[i];
        if (other != stream && wait_for_each_other(stream, other)) {
            if (operation->after.of[i] < other->issued)
                operation->after.of[i] = other->issued;
            merge(&clock, &other->clock);
        }
    }
    clock.of[stream->number] = operation->number;
    check_order(stream, operation, &clock);
    stream->clock = operation->clock = clock;
    if (stream->last)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    pthread_cond_broadcast(&moved);
}

void wait_for(Stream *stream, Number number) {
    while (stream->ended < number)
        pthread_cond_wait(&moved, &lock);
}

void wait_for_all(void) {
    Clock all;
    memset(&all, 0, sizeof all);
    for (int i = 0; i < stream_count; i++) {
        all.of[i] = streams[i].issued;
        wait_for(&streams[i], all.of[i]);
    }
    see(&all);
}
