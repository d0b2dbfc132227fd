// Package toc reads the tables of contents that tools for lazy images add to layers. It knows the
// formats eStargz (gzip), zstd:chunked and SOCI (gzip).
//
// # Contract
//
// An annotation of the layer in the image's manifest has the digest of the table. So the table
// comes from the image's builder. It may still be false. Only unpacking the whole blob shows
// whether the blob has the files that the table names. Read accepts a table only if it is complete
// and consistent, and refuses forms that berth does not need. Then the layer is fetched whole,
// which is always possible. Read limits its memory. Another process decompresses.
//
// The package fetches and stores nothing. Its caller passes functions for that. A Table makes three
// things. Index says where the chunks of files are in the blob (package blobindex). Outline is a
// tar with all entries, but with a byte in place of the content of a file. The unpack worker makes
// a tree from it, by the same rules as from any tar. Place puts the real sizes and places of the
// contents into this tree. The places are those that unpacking the blob would choose.
//
// # Forms
//
// In eStargz, the last gzip member but one has the table, as the file stargz.index.json. The file
// belongs to the layer, unless the tar ends before it. The last member, the footer, has no content.
// Its header has the place of the table. zstd:chunked: a skippable frame has the compressed table.
// An annotation has its place.
//
// In SOCI, the table is a separate blob. SOCI's index names the table, and an annotation of the
// image's manifest names the index (version 2 of SOCI's format). The layer is an ordinary layer.
// The table has points where decompression can begin, and the digest of the blob between two of
// them.
package toc
