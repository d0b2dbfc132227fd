/*
 * logfmt turns a container's output into the records of a CRI log file:
 *
 *	2016-10-06T00:17:09.669794202Z stdout F The content of the line
 *
 * timestamp (RFC 3339, nanoseconds without zeros at their end, UTC), stream, tag, content.
 * Tag F marks the end of a line, P a piece of a line that goes on in the stream's next
 * record. The format is Kubernetes' (pkg/kubelet/kuberuntime/logs).
 */
#ifndef LOGFMT_H
#define LOGFMT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "text.h"

/* How many bytes of content one record has at most if nothing else is asked for: as containerd's max_container_log_line_size. */
#define DEFAULT_MAX_LINE (16 << 10)

/* How many bytes a record is longer than its content, at most. */
#define RECORD_OVERHEAD (sizeof("2006-01-02T15:04:05.999999999Z stdout F \n") - 1)

/* encoder encodes one stream. A line without an end yet is held back until its end arrives, or it is too long, or encoder_flush is called. */
struct encoder {
	const char *stream; /* "stdout" or "stderr" */
	size_t max;
	char *held; /* room for max bytes */
	size_t held_len;
};

/* encoder_init is for lines of at most max bytes, DEFAULT_MAX_LINE if that is not positive. False: there is no memory. */
bool encoder_init(struct encoder *e, const char *stream, int max);

/*
 * encoder_append appends the records of n bytes at data to out as far as they fit, and returns how many bytes
 * it has used up. With room for the maximum and RECORD_OVERHEAD, out takes at least one record.
 */
size_t encoder_append(struct encoder *e, struct line *out, struct text timestamp, const char *data, size_t n);

/* encoder_flush appends what is held back, if anything, as a piece of a line: the stream has ended in the middle of it. */
void encoder_flush(struct encoder *e, struct line *out, struct text timestamp);

/* line_time appends a time, in seconds and nanoseconds since 1970, as records have it. */
void line_time(struct line *l, int64_t seconds, uint32_t nanoseconds);

#endif
