/* Device memory that other processes map. Each operation on it is known to all of them as long as
   its own process has not seen it end: nothing but what processes tell each other then orders those
   of several. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_SHARED = 4096, WORDS = 40 };

typedef struct {
    int process, writes;
    size_t low, high;
    char what[WORDS];
} Entry;

/* Behind the memory, in the same file. */
struct Table {
    atomic_flag busy;
    int mappings;
    Entry entries[MOST_SHARED];
};

/* What a handle holds. */
typedef struct { int process, file, device; size_t size; } Name;
typedef struct { union { Name name; char bytes[64]; }; } Handle;

static int enabled = -1;

API void stand_in_enable_ipc(int enable) {
    pthread_mutex_lock(&lock);
    enabled = enable;
    pthread_mutex_unlock(&lock);
}

static int is_enabled(void) {
    if (enabled < 0)
        enabled = getenv("STAND_IN_IPC") != NULL;
    return enabled;
}

static void take(Table *table) {
    while (atomic_flag_test_and_set(&table->busy))
        usleep(1);
}

static void give(Table *table) { atomic_flag_clear(&table->busy); }

static Table *map_table(int file, size_t size) {
    void *table = mmap(NULL, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, size);
    return table == MAP_FAILED ? NULL : table;
}

void unmap_table(Region *region) {
    if (!region->table)
        return;
    if (region->table->mappings)
        end(MISUSE, "device memory is freed that another process has mapped");
    munmap(region->table, sizeof(Table));
    region->table = NULL;
}

/* A context that has failed uses nothing any more. */
void forget_mapping(Region *region) {
    int process = getpid();
    if (!region->imported || !region->table)
        return;
    take(region->table);
    for (int i = 0; i < MOST_SHARED; i++)
        if (region->table->entries[i].process == process)
            region->table->entries[i].process = 0;
    region->table->mappings--;
    give(region->table);
    munmap(region->table, sizeof(Table));
    region->table = NULL;
}

int share_access(Region *region, size_t low, size_t high, int writes, const char *what) {
    Table *table = region->table;
    int process = getpid(), free = -1;
    Entry other;
    if (!table)
        return -1;
    take(table);
    other.process = 0;
    for (int i = 0; i < MOST_SHARED; i++) {
        Entry *entry = &table->entries[i];
        if (!entry->process)
            free = free < 0 ? i : free;
        else if (entry->process != process && entry->low < high && low < entry->high
                 && (entry->writes || writes))
            other = *entry;
    }
    if (!other.process && free >= 0) {
        Entry *entry = &table->entries[free];
        *entry = (Entry){process, writes, low, high, ""};
        snprintf(entry->what, WORDS, "%s", what);
    }
    give(table);
    if (other.process)
        end(DISORDER,
            "disorder: %s %s bytes %zu to %zu of shared device memory, which %s of process %d %s, "
            "and that has not seen it end",
            what, writes ? "writes" : "reads", low, high, other.what, other.process,
            other.writes ? "writes" : "reads");
    if (free < 0)
        end(MISUSE, "too many operations on shared memory that the host has not seen end");
    return free;
}

void end_shared_access(Region *region, int entry) {
    if (entry < 0 || !region->table)
        return;
    take(region->table);
    region->table->entries[entry].process = 0;
    give(region->table);
}

API Result cuIpcGetMemHandle(Handle *handle, unsigned long long address) {
    IN_CONTEXT({
        Region *region = find((void *)(uintptr_t)address);
        if (!is_enabled())
            result = NOT_SUPPORTED;
        else if (!region || region->device < 0 || region->imported)
            result = INVALID_VALUE;
        else {
            if (!region->table) {
                if (ftruncate(region->file, region->size + sizeof(Table)))
                    result = OUT_OF_MEMORY;
                else
                    region->table = map_table(region->file, region->size);
            }
            /* An MPI that sent it would map it a second time, which CUDA refuses. */
            protect(region, 0, region->size, 0);
            handle->name.process = getpid();
            handle->name.file = region->file;
            handle->name.device = region->device;
            handle->name.size = region->size;
        }
    })
}
API Result cuIpcOpenMemHandle_v2(unsigned long long *address, Handle handle, unsigned flags) {
    (void)flags;
    IN_CONTEXT({
        char path[64];
        break_captures("cuIpcOpenMemHandle");
        counts.blocking++;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.name.process, handle.name.file);
        int file = handle.name.process == getpid() ? -1 : open(path, O_RDWR | O_CLOEXEC);
        Region *region = file < 0 ? NULL : map_region(file, handle.name.size, handle.name.device);
        if (!is_enabled())
            result = NOT_SUPPORTED;
        else if (!region)
            result = INVALID_CONTEXT;
        else {
            region->imported = 1;
            protect(region, 0, region->size, 0);
            region->table = map_table(file, region->size);
            take(region->table);
            region->table->mappings++;
            give(region->table);
            *address = (uintptr_t)region->seen;
        }
    })
}
API Result cuIpcCloseMemHandle(unsigned long long address) {
    IN_CONTEXT({
        Region *region = find((void *)(uintptr_t)address);
        break_captures("cuIpcCloseMemHandle");
        counts.blocking++;
        if (!region || !region->imported)
            result = INVALID_VALUE;
        else {
            wait_for_all();
            forget_mapping(region);
            unmap_region(region);
        }
    })
}
