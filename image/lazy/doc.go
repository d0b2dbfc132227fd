// Package lazy lets containers use layers before they are complete.
//
// # Contract
//
// [Layers.Plan] decides for each missing layer of an image whether a pull creates it from an index
// of its blob, or fetches it whole. [Layers.Create] creates the layer, after the registry of the
// pull has proven that it has the blob. From then on package fill fetches the content, in the
// background and where a process reads. It asks the registries of the pulls that use the layer,
// with the credentials of these pulls, and else those that the records of images name.
//
// An index is one of two: this node has made it while it unpacked the whole blob
// ([Layers.BeginIndex]), or it was made of a table of contents whose digest the image's manifest
// has. A table is proven once the blob is there. A false one ends the layer: its images are
// removed, and the function that [Layers.OnWrongFiles] has set kills the containers on it.
//
// Pulls and the store ask this package for the state of a layer ([Layers.Get], [Layers.Failed],
// [Layers.Await]). It imports neither; what it needs of the recorded images is the interface
// [Images].
package lazy
