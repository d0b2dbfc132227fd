/*
 * logfmt formats a container's output as the records of a CRI log file:
 *
 *	2016-10-06T00:17:09.669794202Z stdout F The content of the line
 *
 * timestamp (RFC 3339, nanoseconds without zeros at their end, UTC), stream, tag, content.
 * Tag F marks the end of a line, P a part of a line that continues in the stream's next record. The
 * format is Kubernetes' (pkg/kubelet/kuberuntime/logs).
 */
#ifndef LOGFMT_H
#define LOGFMT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

/* The default maximum of a record's content, in bytes: containerd's max_container_log_line_size. */
#define DEFAULT_MAX_LINE (16 << 10)

/* The maximum length of a record without its content, in bytes. */
#define RECORD_OVERHEAD (sizeof("2006-01-02T15:04:05.999999999Z stdout F \n") - 1)

/* encoder encodes one stream. It holds an incomplete line until its end, its maximum length, or
 * encoder_flush. */
struct encoder {
	const char *stream; /* "stdout" or "stderr" */
	size_t max;
	char *held; /* max bytes */
	size_t held_len;
};

/* encoder_init sets the maximum length of lines, DEFAULT_MAX_LINE if max is not positive. It
 * returns false if there is no memory. */
bool encoder_init(struct encoder *e, const char *stream, int max);

/*
 * encoder_append appends the records of n bytes at data to out, as far as they fit, and returns the
 * number of consumed bytes. If out has space for the maximum and RECORD_OVERHEAD, at least one
 * record fits.
 */
size_t encoder_append(struct encoder *e, struct line *out, struct text timestamp, const char *data, size_t n);

/* encoder_flush appends the incomplete line at the stream's end, if there is one, with tag P. */
void encoder_flush(struct encoder *e, struct line *out, struct text timestamp);

/* line_time appends a time, in seconds and nanoseconds since 1970, in the records' format. */
void line_time(struct line *l, int64_t seconds, uint32_t nanoseconds);

#endif
