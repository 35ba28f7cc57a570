/* The vectors of a mean on a device, passed to a kernel by value. */

#ifndef MEMBERS_H
#define MEMBERS_H

/* All devices allow 4 KiB of kernel arguments. */
#define MOST_MEMBERS 250

typedef struct {
    const void *vectors[MOST_MEMBERS];
    double shares[MOST_MEMBERS];
    int count;
} Members;

#endif
