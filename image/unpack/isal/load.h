#ifndef BERTH_ISAL_LOAD_H
#define BERTH_ISAL_LOAD_H

#include <isa-l/igzip_lib.h>

// library has the used functions of ISA-L. All are NULL if it was not loaded.
struct library {
	__typeof__(isal_inflate_init) *inflate_init;
	__typeof__(isal_gzip_header_init) *gzip_header_init;
	__typeof__(isal_read_gzip_header) *read_gzip_header;
	__typeof__(isal_inflate_set_dict) *inflate_set_dict;
	__typeof__(isal_inflate) *inflate;
};

extern struct library isal_library;

// isal_works reports whether the loaded library works.
int isal_works(void);

#endif
