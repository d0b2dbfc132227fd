// Package lazy lets containers use layers before they are complete.
//
// # Contract
//
// [Layers.Plan] decides for each missing layer of an image whether a pull creates it from an index
// of its blob, or fetches it whole. [Layers.Create] creates the layer, after the registry of the
// pull has proven that it has the blob. From then on package fill fetches the content, in the
// background and where a process reads. It asks the registries of the pulls that use the layer,
// with the credentials of these pulls. If none serves the blob, it asks the registries in the
// records of images.
//
// An index has one of two sources. This node has made it while it unpacked the whole blob
// ([Layers.BeginIndex]). Or it was made from a table of contents whose digest is in the image's
// manifest. The node checks a table when the whole blob is present. If the table is false, the
// images with the layer are removed, and the function set by [Layers.OnWrongFiles] kills the
// containers on the layer.
//
// Pulls and the store ask this package for the state of a layer ([Layers.Get], [Layers.Failed],
// [Layers.Await]). It imports neither package. The interface [Images] gives it the recorded images.
package lazy
