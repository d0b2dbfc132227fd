/*
 * buffer holds bytes that wait. Its memory is the kernel's own pages, and goes back
 * to it as soon as nothing waits any more.
 */
#ifndef BUFFER_H
#define BUFFER_H

#include <stdbool.h>
#include <stddef.h>

struct buffer {
	char *data;
	size_t start, len; /* what waits is data[start, start+len) */
	size_t cap;
};

/* buffer_append copies n bytes to the end. False: there is no memory, and nothing has changed. */
bool buffer_append(struct buffer *b, const void *from, size_t n);
/* buffer_drop drops the first n bytes, at most what there is. */
void buffer_drop(struct buffer *b, size_t n);
/* buffer_free drops all. */
void buffer_free(struct buffer *b);

static inline const char *buffer_at(const struct buffer *b) { return b->data + b->start; }

#endif
