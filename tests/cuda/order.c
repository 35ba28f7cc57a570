/* What comes after what, and whether operations that touch the same bytes are ordered. */
#include "stand_in.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What an operation does to some bytes, as long as the host has not seen it end. */
typedef struct {
    Region *region;
    size_t low, high;
    int stream, writes;
    Number number;
    const char *what;
    int entry; /* in the region's table, or −1 */
} Access;

int reports = STDERR_FILENO;
Clock host;
static Access accesses[MOST_ACCESSES];
static int access_count;

void end(int status, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dprintf(reports, "stand-in[%d]: %s\n", (int)getpid(), text);
    _exit(status);
}

void merge(Clock *clock, const Clock *other) {
    for (int i = 0; i < MOST_STREAMS; i++)
        if (other->of[i] > clock->of[i])
            clock->of[i] = other->of[i];
}

static int overlap(const Access *access, const Region *region, size_t low, size_t high) {
    return access->region == region && access->low < high && low < access->high;
}

/* What the host may do with pinned bytes now: see `stand_in.h`. */
static void protect_pinned(Region *region, size_t low, size_t high) {
    if (failure) /* what was under way is not watched any more */
        return;
    if (is_page(region))
        low = 0, high = region->size;
    protect(region, low, high, PROT_READ | PROT_WRITE);
    for (int writes = 0; writes < 2; writes++)
        for (int i = 0; i < access_count; i++) {
            const Access *a = &accesses[i];
            if (a->writes == writes && overlap(a, region, low, high))
                protect(region, a->low, a->high, writes ? PROT_NONE : PROT_READ);
        }
}

/* The host sees that all that this clock has has ended. */
void see(const Clock *clock) {
    merge(&host, clock);
    int kept = 0, lifted = access_count;
    Access ended[256];
    do {
        int count = 0;
        kept = 0;
        lifted = access_count;
        for (int i = 0; i < lifted; i++)
            if (host.of[accesses[i].stream] < accesses[i].number || count == 256)
                accesses[kept++] = accesses[i];
            else
                ended[count++] = accesses[i];
        access_count = kept;
        for (int i = 0; i < count; i++) {
            if (ended[i].region->used && ended[i].region->device < 0)
                protect_pinned(ended[i].region, ended[i].low, ended[i].high);
            if (ended[i].region->used)
                end_shared_access(ended[i].region, ended[i].entry);
        }
    } while (kept < lifted);
}

static void touch(const Stream *stream, const Operation *operation, const Clock *clock,
                  const void *address, size_t size, int writes) {
    Region *region = find(address);
    if (!region) {
        if (operation->kind == LAUNCH)
            end(MISUSE, "%s %s host memory that is not pinned", operation->what,
                writes ? "writes" : "reads");
        counts.pageable++;
        return;
    }
    size_t low = (const char *)address - region->seen, high = low + size;
    if (high > region->size)
        end(MISUSE, "%s goes beyond its allocation", operation->what);
    for (int i = 0; i < access_count; i++) {
        const Access *a = &accesses[i];
        if (overlap(a, region, low, high) && (a->writes || writes)
            && clock->of[a->stream] < a->number)
            end(DISORDER,
                "disorder: %s on stream %d %s bytes %zu to %zu of %s memory, which %s on stream "
                "%d %s, and nothing orders them",
                operation->what, stream->number, writes ? "writes" : "reads", low, high,
                region->device < 0 ? "pinned" : "device", a->what, a->stream,
                a->writes ? "writes" : "reads");
    }
    if (access_count == MOST_ACCESSES)
        end(MISUSE, "too many operations that the host has not seen end");
    accesses[access_count++] = (Access){region, low, high, stream->number, writes,
                                        operation->number, operation->what,
                                        share_access(region, low, high, writes, operation->what)};
    if (region->device < 0)
        protect_pinned(region, low, high);
}

static void touch_all(const Stream *stream, const Operation *operation, const Clock *clock) {
    int count;
    const Touch *touches = touches_of(operation->launch, &count);
    for (int i = 0; i < count; i++)
        touch(stream, operation, clock, touches[i].address, touches[i].size, touches[i].writes);
}

/* End the process where an operation with this clock is not ordered after another. */
void check_order(const Stream *stream, const Operation *operation, const Clock *clock) {
    if (operation->kind == COPY)
        touch(stream, operation, clock, operation->from, operation->size, 0);
    if (operation->kind == COPY || operation->kind == FILL)
        touch(stream, operation, clock, operation->to, operation->size, 1);
    if (operation->kind == LAUNCH)
        touch_all(stream, operation, clock);
}
