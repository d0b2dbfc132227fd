// Package imagefs looks into images before anything of them runs: who their users are, and whether
// they have a path.
//
// # Contract
//
// An image is looked at as its containers would see it, links between layers included, through
// a mount that is in no mount namespace and is gone when the call returns. Whatever is
// in the image, nothing outside it is read (internal/safefs), and no more than a limit. What is the image's fault is
// InvalidArgument. The caller holds the layers.
package imagefs
