// Package tree is the tree of an image's files without their data: what an EROFS image is made of.
//
// # Contract
//
// Whoever unpacks a layer writes its tree with Encode, and the data of its files into a data file beside it. The tree may
// have been written by somebody whom the layer has taken over, so Decode believes nothing: what it returns is a tree
// with names, numbers and sizes that a filesystem can have, within a Limit, and whose files lie in the data file.
// A Merger puts the trees of layers on each other as overlayfs would show them and settles what a layer says about those
// below it: whiteouts, opaque directories, hard links, directories that it does not list.
//
// The form is a header and the nodes, depth first, each directory's in the order of their names (Encode). The same
// tree has one form.
package tree
