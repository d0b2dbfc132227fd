// Package tree has the tree of an image's files, without their content. An EROFS image is made from
// it.
//
// # Contract
//
// berth-unpack writes the tree of a layer with Encode, and the content of its files into a data
// file beside it. A layer may have compromised that process, so Decode trusts nothing. It returns a
// tree with names, numbers and sizes that a filesystem can have, within a Limit, and with files
// that lie in the data file. A Merger stacks the trees of layers as overlayfs would show them. It
// resolves everything in a layer that depends on the layers below: whiteouts, opaque directories,
// hard links and unlisted directories.
//
// The format is a header and the nodes, depth first. The nodes of a directory are sorted by name
// (Encode). A tree has exactly one encoding.
package tree
