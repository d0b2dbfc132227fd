// Package tree has the tree of an image's files, without their content. An EROFS image is made from
// it.
//
// # Contract
//
// berth-unpack writes the tree of a layer with Encode, and the content of its files into a data
// file beside it. A layer may have compromised that process, so Decode trusts nothing. It returns a
// tree within a Limit. Its names, numbers and sizes are possible in a filesystem, and the content
// of its files is inside the data file. A Merger stacks the trees of layers as overlayfs would show
// them. It resolves everything in a layer that depends on the layers below: whiteouts, opaque
// directories, hard links and unlisted directories.
//
// The format is a header and the nodes, depth first. The nodes of a directory are sorted by name
// (Encode). A tree has exactly one encoding.
package tree
