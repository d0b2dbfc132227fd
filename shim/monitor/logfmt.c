#include "logfmt.h"
#include "sys.h"

bool encoder_init(struct encoder *e, const char *stream, int max)
{
	long held;

	*e = (struct encoder){.stream = stream, .max = max > 0 ? (size_t)max : DEFAULT_MAX_LINE};
	held = sys_mmap(e->max);
	if (failed(held))
		return false;
	e->held = (char *)held;
	return true;
}

static void record(
	struct encoder *e, struct line *out, struct text timestamp, const char *tag, const char *content, size_t n)
{
	line_bytes(out, timestamp.at, timestamp.len);
	line_text(out, " ");
	line_text(out, e->stream);
	line_text(out, tag);
	line_bytes(out, e->held, e->held_len);
	line_bytes(out, content, n);
	line_text(out, "\n");
	e->held_len = 0;
}

/*
 * cut finds the next record's content in data, which follows the held content. It returns the tag,
 * NULL if the line is incomplete. len is the content's length, size the number of consumed bytes of
 * data.
 */
static const char *cut(const struct encoder *e, const char *data, size_t n, size_t *len, size_t *size)
{
	size_t room = e->max - e->held_len;
	size_t look = n > room ? room + 1 : n;
	size_t end = find(data, look, '\n');

	if (end < look) {
		*len = end;
		*size = end + 1;
		return " F ";
	}
	*len = *size = room;
	return n > room ? " P " : NULL;
}

size_t encoder_append(struct encoder *e, struct line *out, struct text timestamp, const char *data, size_t n)
{
	size_t done = 0;

	while (done < n) {
		size_t len, size;
		const char *tag = cut(e, data + done, n - done, &len, &size);

		if (tag == NULL) {
			memcpy(e->held + e->held_len, data + done, n - done);
			e->held_len += n - done;
			return n;
		}
		if (out->cap - out->len < RECORD_OVERHEAD + e->held_len + len)
			return done;
		record(e, out, timestamp, tag, data + done, len);
		done += size;
	}
	return done;
}

void encoder_flush(struct encoder *e, struct line *out, struct text timestamp)
{
	if (e->held_len > 0)
		record(e, out, timestamp, " P ", NULL, 0);
}

/* line_date appends the date of a day, counted from 1970-01-01. */
static void line_date(struct line *l, uint64_t days)
{
	/* Years start in March here, so the leap day is the last day, and repeat every 400
	 * years. From 0000-03-01 to 1970-01-01 there are 719,468 days. */
	uint64_t z = days + 719468;
	uint64_t day_of_era = z % 146097;
	uint64_t year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
	uint64_t day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
	uint64_t month = (5 * day_of_year + 2) / 153; /* 0 is March */
	uint64_t day = day_of_year - (153 * month + 2) / 5 + 1;
	uint64_t year = z / 146097 * 400 + year_of_era + (month >= 10);

	line_padded(l, year, 4);
	line_text(l, "-");
	line_padded(l, month < 10 ? month + 3 : month - 9, 2);
	line_text(l, "-");
	line_padded(l, day, 2);
}

void line_time(struct line *l, int64_t seconds, uint32_t nanoseconds)
{
	uint64_t s = seconds > 0 ? (uint64_t)seconds : 0; /* a clock before 1970 is wrong anyway */
	unsigned int digits = 9;

	line_date(l, s / 86400);
	line_text(l, "T");
	line_padded(l, s / 3600 % 24, 2);
	line_text(l, ":");
	line_padded(l, s / 60 % 60, 2);
	line_text(l, ":");
	line_padded(l, s % 60, 2);
	if (nanoseconds > 0) {
		while (nanoseconds % 10 == 0) {
			nanoseconds /= 10;
			digits--;
		}
		line_text(l, ".");
		line_padded(l, nanoseconds, digits);
	}
	line_text(l, "Z");
}
