// Package toc reads the tables of contents that tools for lazy images add to layers: those of
// eStargz (gzip), of zstd:chunked, and of SOCI (gzip).
//
// # Contract
//
// An annotation of the layer in the image's manifest has the digest of the table. So the table is
// what the image's builder has made. It need not be true: nothing but unpacking the whole blob
// shows that the blob has the files that the table names. Read accepts a table only if it is
// complete and consistent, and refuses forms that berth does not need. Then the layer is fetched
// whole, which is always possible. Read limits its memory; another process decompresses.
//
// The package fetches and stores nothing: its caller gives it the functions. A Table makes three
// things. Index says where the chunks of files are in the blob (package blobindex). Outline is a tar
// with all entries, but with a byte in place of the content of a file. The unpack worker makes a
// tree of it, by the same rules as of any tar. Place puts the real sizes and places of the contents
// into this tree. The places are those that unpacking the blob would choose.
//
// # Forms
//
// eStargz: the last gzip member but one has the table as the file stargz.index.json. It belongs to
// the layer, unless the end of the tar is before it. The last member, the footer, has no content,
// and the place of the table in its header. zstd:chunked: a skippable frame has the compressed
// table. An annotation has its place.
//
// SOCI: the table is a blob of its own. SOCI's index names it, and an annotation of the image's
// manifest names that index (version 2 of SOCI's format). The layer is an ordinary one. The table
// has points where decompression can begin, and the digest of the blob between two of them.
package toc
