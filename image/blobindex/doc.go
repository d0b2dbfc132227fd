// Package blobindex describes where the decompression of a layer's blob can begin, and how a part
// of the blob is verified. With an index, a layer can be used before all of its blob is present.
//
// # Contract
//
// Only Store reads and writes files. An Index is immutable once it is complete. Decode trusts
// nothing. It limits its memory by the length of its input, and it returns only an Index whose
// numbers are consistent. It cannot tell whether they are true, because a blob may have compromised
// the process that noted the points. Wrong points give a tar with a wrong digest.
//
// The states of an index cannot be wrong, because the daemon takes them itself while it hashes the
// blob. So Verify shows that bytes belong to the blob before anything decompresses them.
//
// # Terms
//
// A point is a place in the blob where decompression can begin. It is the start of a deflate block,
// of a gzip member or of a zstd frame. A span is what lies between two points, or between the last
// point and the end. Spans are numbered from zero. The grid divides the blob into ranges of Grid
// bytes, the units of verification.
//
// # Indexes of chunks
//
// An index that is made from a blob's table of contents has no states, because nobody has hashed
// the blob yet. It has the digests of the files' chunks instead. So bytes are verified after
// decompression, and only if they are file content. The tar of such an index is not the blob's tar.
// It joins the spans, each up to the end of its last chunk. Nothing shows that the table is true
// before the whole blob was unpacked (package fill, "Tables of contents").
//
// A sealed index is made of SOCI's table. It has a digest of each span's bytes in the blob, and no
// digests of chunks. So bytes are verified before decompression.
//
// # Store
//
// A Store keeps indexes below one directory. An index belongs to a blob, not to an image, so it
// outlives the images with that blob: their next pull can be lazy. All indexes have a common limit.
// The least recently used ones are removed first.
//
// An index is a directory named by the blob's digest. It has the encoding, and the names of the
// registries that have served the blob. It also has links to two files of the layer, its tree and
// the record of its tar. An index has the names of all files of a layer, so only users of these
// registries may see it (docs/adr/001-layer-access.md). The links take no space while the layer
// exists. An index appears whole or not at all, but is not synced: Get checks all digests and
// removes a damaged one. A blob does not need an index. So a failure to write an index never makes
// a pull fail.
//
// # Format
//
// An index is three files: its encoding, the tree and the record. The tree and the record are also
// files of the layer, so they can be links. The encoding has their digests. It begins with magic.
// Three sections follow, each a varint length and its bytes: numbers and digests, states, points.
// The SHA-256 of all this ends it. An index of chunks begins with chunksMagic or sealedMagic, and
// has points and chunks in place of states and points.
package blobindex
