/* The vectors of a mean on a device, as a kernel gets them by value. */

#ifndef MEMBERS_H
#define MEMBERS_H

/* All devices allow a kernel's arguments 4 KiB. */
#define MOST_MEMBERS 250

typedef struct {
    const void *vectors[MOST_MEMBERS];
    double shares[MOST_MEMBERS];
    int count;
} Members;

#endif
