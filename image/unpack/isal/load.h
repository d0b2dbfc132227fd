#ifndef BERTH_ISAL_LOAD_H
#define BERTH_ISAL_LOAD_H

#include <isa-l/igzip_lib.h>

// library has the functions of ISA-L that are called. All are NULL where it was not loaded.
struct library {
	__typeof__(isal_inflate_init) *inflate_init;
	__typeof__(isal_gzip_header_init) *gzip_header_init;
	__typeof__(isal_read_gzip_header) *read_gzip_header;
	__typeof__(isal_inflate) *inflate;
};

extern struct library isal_library;

// isal_works reports whether the library, which was loaded, can be used.
int isal_works(void);

#endif
