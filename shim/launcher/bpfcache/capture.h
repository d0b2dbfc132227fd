// Wrappers of the libseccomp functions that return or install a program (the linker's --wrap).
// While they capture, these functions keep the program and fail with ECANCELED. One thread at a
// time may make a filter then.
#ifndef BERTH_BPFCACHE_CAPTURE_H
#define BERTH_BPFCACHE_CAPTURE_H

#include <stdbool.h>
#include <stddef.h>

void capture_start(void);

// capture_program returns the last exported program, which is valid until capture_stop, or NULL.
const void *capture_program(size_t *size);

void capture_stop(void);

#endif
