//go:build isal && cgo

#include <dlfcn.h>
#include <stddef.h>

#include "load.h"

struct library isal_library;

// It is loaded from the node's root directory, before berth-unpack leaves that for a layer's: constructors with a priority
// come before those without, as package early's is. 101 is the first that programs may have.
__attribute__((constructor(101))) static void load(void)
{
	void *so = dlopen("libisal.so.2", RTLD_NOW | RTLD_LOCAL);
	if (so == NULL)
		return;
	struct library found = {
		.inflate_init = dlsym(so, "isal_inflate_init"),
		.gzip_header_init = dlsym(so, "isal_gzip_header_init"),
		.read_gzip_header = dlsym(so, "isal_read_gzip_header"),
		.inflate = dlsym(so, "isal_inflate"),
	};
	if (found.inflate_init && found.gzip_header_init && found.read_gzip_header && found.inflate)
		isal_library = found;
	else
		dlclose(so); // another version
}
