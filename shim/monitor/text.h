/* Functions for memory, numbers and text, all with explicit bounds. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

void *memcpy(void *restrict dst, const void *restrict src, size_t n);
void *memmove(void *dst, const void *src, size_t n);
void *memset(void *dst, int c, size_t n);
int memcmp(const void *a, const void *b, size_t n);
size_t strlen(const char *s);

/* min returns the smaller of two sizes. */
static inline size_t min(size_t a, size_t b) { return a < b ? a : b; }

/* text is a part of a byte array, without a terminating zero. */
struct text {
	const char *at;
	size_t len;
};

struct text text_of(const char *s);
bool text_equals(struct text t, const char *s);
/* text_cut splits t at the first c into before and, in t, the rest. If there is no c, it returns
 * false, and before is all of t. */
bool text_cut(struct text *t, char c, struct text *before);
/* text_after removes everything up to and including the first s. If there is no s, it returns false
 * and does not change t. */
bool text_after(struct text *t, const char *s);
/* text_trim removes blanks, tabs and line ends from both ends. */
struct text text_trim(struct text t);
/* text_unsigned parses all of t as a decimal number of at most max. */
bool text_unsigned(struct text t, uint64_t max, uint64_t *n);
/* text_int is text_unsigned with an optional sign. */
bool text_int(struct text t, int *n);

/* find returns the index of the first c in n bytes, n if there is none. */
size_t find(const char *at, size_t n, char c);

/* line is a text buffer. Text that does not fit is discarded. */
struct line {
	char *at;
	size_t len, cap;
};

void line_text(struct line *l, const char *s);
void line_bytes(struct line *l, const char *at, size_t n);
void line_unsigned(struct line *l, uint64_t n, unsigned int base);
void line_int(struct line *l, int64_t n);
/* line_padded appends n with at least that many decimal digits. */
void line_padded(struct line *l, uint64_t n, unsigned int digits);

/* error_text returns an errno's name. */
void line_error(struct line *l, int err);

#endif
