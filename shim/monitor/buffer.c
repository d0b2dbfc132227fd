#include "buffer.h"
#include "sys.h"
#include "text.h"

#define PAGE 4096 /* mappings are rounded up to the kernel's own pages */

/* grow makes space for n bytes in total. */
static bool grow(struct buffer *b, size_t n)
{
	size_t cap = b->cap == 0 ? PAGE : b->cap;
	long at;

	while (cap < n)
		cap *= 2;
	at = b->data == NULL ? sys_mmap(cap) : sys_mremap(b->data, b->cap, cap);
	if (failed(at))
		return false;
	b->data = (char *)at;
	b->cap = cap;
	return true;
}

bool buffer_append(struct buffer *b, const void *from, size_t n)
{
	if (n == 0)
		return true;
	/* Each move frees as much as it copies. */
	if (b->start + b->len + n > b->cap && b->start >= b->len && b->start > 0) {
		memcpy(b->data, b->data + b->start, b->len);
		b->start = 0;
	}
	if (b->start + b->len + n > b->cap && !grow(b, b->start + b->len + n))
		return false;
	memcpy(b->data + b->start + b->len, from, n);
	b->len += n;
	return true;
}

void buffer_drop(struct buffer *b, size_t n)
{
	n = min(n, b->len);
	b->start += n;
	b->len -= n;
	if (b->len == 0)
		buffer_free(b);
}

void buffer_free(struct buffer *b)
{
	if (b->data != NULL)
		sys_munmap(b->data, b->cap);
	*b = (struct buffer){0};
}
