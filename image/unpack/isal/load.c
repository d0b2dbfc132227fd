//go:build isal && cgo

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "load.h"

struct library isal_library;

// isal_works checks that the library decompresses a sample. The structures of the header may be
// smaller than those of the loaded library, if the versions differ. So there is room after the
// structures. The confined program calls it before the first gzip, so a library that crashes
// affects only gzip.
int isal_works(void)
{
	const struct library *l = &isal_library;
	static uint8_t gzip[] = {
		0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xff, 0x2b, 0xcf, 0x48, 0x2c, 0x51, 0xc8,
		0xcc, 0x4b, 0xcb, 0x49, 0x2c, 0x49, 0x2d, 0x56, 0x28, 0xc9, 0xc8, 0x2c, 0xd6, 0x41, 0x70, 0x73,
		0x12, 0x2b, 0x53, 0x8b, 0x8a, 0xb9, 0x00, 0x44, 0x8d, 0x72, 0x78, 0x24, 0x00, 0x00, 0x00,
	};
	static const char text[] = "what inflates this, inflates layers\n";
	struct {
		struct inflate_state state;
		char room[16 << 10];
		struct isal_gzip_header header;
		char more[4 << 10];
		char out[2 * sizeof text];
	} *t = calloc(1, sizeof *t);
	if (t == NULL)
		return 0;
	l->inflate_init(&t->state);
	l->gzip_header_init(&t->header);
	t->state.crc_flag = ISAL_GZIP_NO_HDR_VER;
	t->state.next_in = gzip, t->state.avail_in = sizeof gzip;
	t->state.next_out = (uint8_t *)t->out, t->state.avail_out = sizeof t->out;
	int right = l->read_gzip_header(&t->state, &t->header) == ISAL_DECOMP_OK && l->inflate(&t->state) == ISAL_DECOMP_OK &&
		t->state.block_state == ISAL_BLOCK_FINISH && t->state.avail_in == 0 &&
		t->state.avail_out == sizeof t->out - strlen(text) && memcmp(t->out, text, strlen(text)) == 0;
	free(t);
	return right;
}

// load loads the library from the node's root directory, before berth-unpack changes its root.
// Constructors with a priority run before package early's, which has none. 101 is the first
// priority that programs may use.
__attribute__((constructor(101))) static void load(void)
{
	void *so = dlopen("libisal.so.2", RTLD_NOW | RTLD_LOCAL);
	if (so == NULL)
		return;
	struct library found = {
		.inflate_init = dlsym(so, "isal_inflate_init"),
		.gzip_header_init = dlsym(so, "isal_gzip_header_init"),
		.read_gzip_header = dlsym(so, "isal_read_gzip_header"),
		.inflate_set_dict = dlsym(so, "isal_inflate_set_dict"),
		.inflate = dlsym(so, "isal_inflate"),
	};
	if (found.inflate_init && found.gzip_header_init && found.read_gzip_header && found.inflate_set_dict && found.inflate)
		isal_library = found;
	else
		dlclose(so); // another version, so Go decompresses
}
