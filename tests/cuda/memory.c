/* Memory: each region is mapped twice, where applications see it, with the protection that makes a
   mistake a fault, and where streams read and write it. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, GARBAGE = 0xA5 };

struct Counts counts;
int is_open;
long long limit;
static Region regions[MOST_REGIONS];

Region *find(const void *address) {
    const char *p = address;
    for (int i = 0; i < MOST_REGIONS; i++)
        if (regions[i].used && p >= regions[i].seen && p < regions[i].seen + regions[i].size)
            return &regions[i];
    return NULL;
}

/* Where a stream reads what applications see here. */
void *reach(const void *address) {
    Region *region = find(address);
    return region ? region->ours + ((const char *)address - region->seen) : (void *)address;
}

static void count(int device, long long size) {
    long long *now = device < 0 ? &counts.pinned_bytes : &counts.device_bytes;
    long long *peak = device < 0 ? &counts.pinned_peak : &counts.device_peak;
    *now += size;
    if (*now > *peak)
        *peak = *now;
}

char *allocate(size_t size, int device) {
    size = (size + PAGE - 1) / PAGE * PAGE;
    if (device >= 0 && limit && counts.device_bytes + (long long)size > limit)
        return NULL;
    int file = memfd_create("stand-in", MFD_CLOEXEC);
    Region *region = file < 0 || ftruncate(file, size) ? NULL : map_region(file, size, device);
    if (!region)
        return NULL;
    memset(region->ours, GARBAGE, size); /* nobody may count on zeros */
    count(device, size);
    return region->seen;
}

Region *map_region(int file, size_t size, int device) {
    Region *region = NULL;
    for (int i = 0; i < MOST_REGIONS && !region; i++)
        if (!regions[i].used)
            region = &regions[i];
    if (!region)
        return NULL;
    int protection = device < 0 || is_open ? PROT_READ | PROT_WRITE : PROT_NONE;
    char *seen = mmap(NULL, size, protection, MAP_SHARED, file, 0);
    char *ours = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (seen == MAP_FAILED || ours == MAP_FAILED)
        return NULL;
    *region = (Region){.seen = seen, .ours = ours, .size = size, .device = device, .used = 1,
                       .file = file};
    return region;
}

void unmap_region(Region *region) {
    unmap_table(region);
    munmap(region->seen, region->size);
    munmap(region->ours, region->size);
    close(region->file);
    region->used = 0;
}

/* Free memory once the device is done with it, as CUDA does. */
Result release(void *address, int pinned) {
    Region *region = find(address);
    if (!region || region->seen != address || pinned != (region->device < 0) || region->imported)
        return INVALID_VALUE;
    wait_for_all();
    unmap_region(region);
    count(region->device, -(long long)region->size);
    return SUCCESS;
}

int is_page(const Region *region) { return region->size == PAGE; }

/* Protect the whole pages of these bytes where applications see them, or the only page. */
void protect(Region *region, size_t low, size_t high, int protection) {
    if (is_page(region))
        low = 0, high = PAGE;
    low = (low + PAGE - 1) / PAGE * PAGE;
    high = high / PAGE * PAGE;
    if (low < high)
        mprotect(region->seen + low, high - low, protection);
}

/* Write a number where the host, once it reads it, is told of all that comes before it. */
void write_number(const Operation *operation) {
    Region *region = find(operation->to);
    mprotect(region->seen, region->size, PROT_NONE);
    region->tells = 1;
    merge(&region->told, &operation->clock);
    *(unsigned *)reach(operation->to) = operation->value;
}

/* Nothing is under way any more that reads or writes pinned memory, or other processes'. */
void unprotect_all(void) {
    for (int i = 0; i < MOST_REGIONS; i++)
        if (regions[i].used && regions[i].device < 0)
            mprotect(regions[i].seen, regions[i].size, PROT_READ | PROT_WRITE);
        else if (regions[i].used)
            forget_mapping(&regions[i]);
}

static void on_fault(int signal_number, siginfo_t *info, void *context) {
    pthread_mutex_lock(&lock);
    Region *region = find(info->si_addr);
    if (region && region->tells) {
        see(&region->told);
        mprotect(region->seen, region->size, PROT_READ | PROT_WRITE);
        pthread_mutex_unlock(&lock);
        return;
    }
    if (region)
        end(HOST_ACCESS, "the host touches %s memory, byte %zd of %zu%s",
            region->device < 0 ? "pinned" : "device", (char *)info->si_addr - region->seen,
            region->size, region->device < 0 ? ", and has not seen the copy end that does" : "");
    pthread_mutex_unlock(&lock);
    signal(signal_number, SIG_DFL);
    (void)context;
}

void install_handler(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO; /* not on faulthandler's stack, which is small */
    sigaction(SIGSEGV, &action, NULL);
}
