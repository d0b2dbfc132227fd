/*
 * buffer is a queue of bytes. It maps its memory directly from the kernel, and unmaps it when it is
 * empty.
 */
#ifndef BUFFER_H
#define BUFFER_H

#include <stdbool.h>
#include <stddef.h>

struct buffer {
	char *data;
	size_t start, len; /* the content is data[start, start+len) */
	size_t cap;
};

/* buffer_append copies n bytes to the end. If there is no memory, it returns false and changes
 * nothing. */
bool buffer_append(struct buffer *b, const void *from, size_t n);
/* buffer_drop removes the first n bytes, or all. */
void buffer_drop(struct buffer *b, size_t n);
/* buffer_free removes all bytes. */
void buffer_free(struct buffer *b);

static inline const char *buffer_at(const struct buffer *b) { return b->data + b->start; }

#endif
