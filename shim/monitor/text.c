#include "text.h"

#include <asm/errno.h>

typedef uint64_t __attribute__((may_alias, aligned(1))) word;

#ifndef HOSTED /* functions that the compiler calls in any environment */

/* The barriers keep the compiler from replacing a loop by a call of the function itself. */
#define BARRIER() __asm__ volatile("" ::: "memory")

/* copy_up copies from the start. It is safe for overlapping memory if dst is not above src. */
static void copy_up(char *dst, const char *src, size_t n)
{
	for (; n >= sizeof(word); n -= sizeof(word), dst += sizeof(word), src += sizeof(word)) {
		*(word *)dst = *(const word *)src;
		BARRIER();
	}
	while (n-- > 0) {
		*dst++ = *src++;
		BARRIER();
	}
}

void *memcpy(void *restrict dst, const void *restrict src, size_t n)
{
	copy_up(dst, src, n);
	return dst;
}

void *memmove(void *dst, const void *src, size_t n)
{
	char *d = dst;
	const char *s = src;

	if (d <= s || d >= s + n) {
		copy_up(d, s, n);
		return dst;
	}
	while (n-- > 0) {
		d[n] = s[n];
		BARRIER();
	}
	return dst;
}

void *memset(void *dst, int c, size_t n)
{
	char *d = dst;

	while (n-- > 0) {
		*d++ = (char)c;
		BARRIER();
	}
	return dst;
}

int memcmp(const void *a, const void *b, size_t n)
{
	const unsigned char *x = a, *y = b;

	for (size_t i = 0; i < n; i++)
		if (x[i] != y[i])
			return x[i] < y[i] ? -1 : 1;
	return 0;
}

size_t strlen(const char *s)
{
	size_t n = 0;

	while (s[n] != 0) {
		n++;
		BARRIER();
	}
	return n;
}

#endif

struct text text_of(const char *s) { return (struct text){s, strlen(s)}; }

bool text_equals(struct text t, const char *s) { return t.len == strlen(s) && memcmp(t.at, s, t.len) == 0; }

bool text_cut(struct text *t, char c, struct text *before)
{
	size_t i = find(t->at, t->len, c);
	bool found = i < t->len;

	*before = (struct text){t->at, i};
	t->at += i + found;
	t->len -= i + found;
	return found;
}

bool text_after(struct text *t, const char *s)
{
	size_t n = strlen(s);

	for (size_t i = 0; i + n <= t->len; i++) {
		if (memcmp(t->at + i, s, n) == 0) {
			t->at += i + n;
			t->len -= i + n;
			return true;
		}
	}
	return false;
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

struct text text_trim(struct text t)
{
	while (t.len > 0 && is_space(t.at[0])) {
		t.at++;
		t.len--;
	}
	while (t.len > 0 && is_space(t.at[t.len - 1]))
		t.len--;
	return t;
}

bool text_unsigned(struct text t, uint64_t max, uint64_t *n)
{
	uint64_t sum = 0;

	if (t.len == 0)
		return false;
	for (size_t i = 0; i < t.len; i++) {
		uint64_t digit = (unsigned char)t.at[i] - (uint64_t)'0';

		if (digit > 9 || digit > max || sum > (max - digit) / 10)
			return false;
		sum = 10 * sum + digit;
	}
	*n = sum;
	return true;
}

bool text_int(struct text t, int *n)
{
	bool negative = t.len > 0 && t.at[0] == '-';
	uint64_t size;

	if (negative) {
		t.at++;
		t.len--;
	}
	if (!text_unsigned(t, INT32_MAX, &size))
		return false;
	*n = negative ? -(int)size : (int)size;
	return true;
}

size_t find(const char *at, size_t n, char c)
{
	const uint64_t ones = 0x0101010101010101, tops = 0x8080808080808080;
	size_t i = 0;

	/* This compares a word at a time. One of its bytes is c if the difference has a zero byte. */
	for (; n - i >= sizeof(word); i += sizeof(word)) {
		uint64_t difference = *(const word *)(at + i) ^ (ones * (unsigned char)c);

		if (((difference - ones) & ~difference & tops) != 0)
			break;
	}
	while (i < n && at[i] != c)
		i++;
	return i;
}

void line_bytes(struct line *l, const char *at, size_t n)
{
	n = min(n, l->cap - l->len);
	memcpy(l->at + l->len, at, n);
	l->len += n;
}

void line_text(struct line *l, const char *s) { line_bytes(l, s, strlen(s)); }

static void line_digits(struct line *l, uint64_t n, unsigned int base, unsigned int digits)
{
	char buf[64];
	size_t i = sizeof(buf);

	while (n > 0 || digits > 0) {
		buf[--i] = "0123456789abcdef"[n % base];
		n /= base;
		digits -= digits > 0;
	}
	line_bytes(l, buf + i, sizeof(buf) - i);
}

void line_unsigned(struct line *l, uint64_t n, unsigned int base) { line_digits(l, n, base, 1); }

void line_padded(struct line *l, uint64_t n, unsigned int digits) { line_digits(l, n, 10, digits); }

void line_int(struct line *l, int64_t n)
{
	if (n < 0)
		line_text(l, "-");
	line_digits(l, n < 0 ? -(uint64_t)n : (uint64_t)n, 10, 1);
}

/* The errors of opening a log or resizing a terminal. Other errors are returned as numbers. */
static const char *error_name(int err)
{
	switch (err) {
	case EPERM: return "operation not permitted";
	case ENOENT: return "no such file or directory";
	case EINTR: return "interrupted system call";
	case EIO: return "input/output error";
	case ENXIO: return "no such device or address";
	case EAGAIN: return "resource temporarily unavailable";
	case ENOMEM: return "cannot allocate memory";
	case EACCES: return "permission denied";
	case EBUSY: return "device or resource busy";
	case EXDEV: return "invalid cross-device link";
	case ENODEV: return "no such device";
	case ENOTDIR: return "not a directory";
	case EISDIR: return "is a directory";
	case EINVAL: return "invalid argument";
	case ENFILE: return "too many open files in system";
	case EMFILE: return "too many open files";
	case ENOSPC: return "no space left on device";
	case EROFS: return "read-only file system";
	case ENAMETOOLONG: return "file name too long";
	case ENOSYS: return "function not implemented";
	case ELOOP: return "too many levels of symbolic links";
	case ESTALE: return "stale file handle";
	case EDQUOT: return "disk quota exceeded";
	case ENOTCONN: return "transport endpoint is not connected";
	}
	return NULL;
}

void line_error(struct line *l, int err)
{
	const char *name = error_name(err);

	if (name != NULL) {
		line_text(l, name);
		return;
	}
	line_text(l, "errno ");
	line_int(l, err);
}
