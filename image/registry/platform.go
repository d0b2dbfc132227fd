package registry

import (
	"cmp"
	"errors"
	"runtime"
	"slices"
	"strconv"

	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/cpu"

	"berth/internal/errdefs"
)

// DefaultPlatform returns the platform of this program. On amd64, the variant is the level of the
// CPU. So an image for a higher level is chosen before one for all CPUs.
func DefaultPlatform() ocispec.Platform {
	return ocispec.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH, Variant: cpuLevel()}
}

// cpuLevel returns the level of an amd64 CPU, v1 to v4, as in the x86-64 psABI; empty for others.
// Package platforms ranks levels but does not detect them.
func cpuLevel() string {
	if runtime.GOARCH != "amd64" {
		return ""
	}
	x, level := &cpu.X86, 1
	for _, features := range [][]bool{
		{x.HasCX16, x.HasLAHF, x.HasPOPCNT, x.HasSSE3, x.HasSSE41, x.HasSSE42, x.HasSSSE3},
		{x.HasAVX, x.HasAVX2, x.HasBMI1, x.HasBMI2, x.HasF16C, x.HasFMA, x.HasLZCNT, x.HasMOVBE, x.HasOSXSAVE},
		{x.HasAVX512F, x.HasAVX512BW, x.HasAVX512CD, x.HasAVX512DQ, x.HasAVX512VL},
	} {
		if slices.Contains(features, false) {
			break
		}
		level++
	}
	return "v" + strconv.Itoa(level)
}

// choosePlatform returns the manifest of an index that suits a node best. It is the first manifest
// with the best matching platform. If none matches, it is the first manifest without a platform. An
// artifact is chosen only if there is no image. Annotations have no effect. The attestations of
// buildx have the platform unknown/unknown, so they are never chosen.
func choosePlatform(manifests []ocispec.Descriptor, node ocispec.Platform) (best ocispec.Descriptor, ok bool) {
	var images, artifacts []ocispec.Descriptor
	for _, m := range manifests {
		switch {
		case m.ArtifactType == sociIndexType: // an artifact has the platform of its image
		case m.ArtifactType != "":
			artifacts = append(artifacts, m)
		default:
			images = append(images, m)
		}
	}
	if best, ok = bestOf(images, node); ok {
		return best, true
	}
	return bestOf(artifacts, node)
}

// bestOf is choosePlatform among manifests of one kind.
func bestOf(manifests []ocispec.Descriptor, node ocispec.Platform) (best ocispec.Descriptor, ok bool) {
	matcher := platforms.Only(node)
	for _, m := range manifests {
		if m.Platform != nil && matcher.Match(*m.Platform) && (!ok || matcher.Less(*m.Platform, *best.Platform)) {
			best, ok = m, true
		}
	}
	if ok {
		return best, true
	}
	i := slices.IndexFunc(manifests, func(m ocispec.Descriptor) bool { return m.Platform == nil })
	if i < 0 {
		return best, false
	}
	return manifests[i], true
}

// choice finds the image of a document that suits a node.
type choice struct {
	node   ocispec.Platform
	top    digest.Digest // of the document
	read   func(ocispec.Descriptor) (document, error)
	config func(ocispec.Manifest) (*Image, error) // reads the configuration of an image
	// local says that the documents are on this machine. Other runtimes keep only a part of an
	// index, perhaps for a lower level of the CPU.
	local bool

	failed int   // manifests that did not suit the node
	other  error // of the first image for another platform
}

// maxFailed limits the manifests without a platform that are read in vain, because each costs two
// requests.
const maxFailed = 16

// image returns the image of a document with all documents that lead to it.
func (c *choice) image(doc document, d digest.Digest) (*Image, error) {
	img, err := c.imageOf(doc, d, false, 0)
	if err == nil {
		img.Digest = d
	}
	return img, err
}

// imageOf implements image. unstated says that an index names the document without a platform.
func (c *choice) imageOf(doc document, d digest.Digest, unstated bool, depth int) (img *Image, err error) {
	switch {
	case doc.index != nil && depth == MaxIndexDepth:
		return nil, errdefs.FailedPrecondition("more than %d indexes are nested", MaxIndexDepth)
	case doc.index != nil:
		img, err = c.best(doc.index, depth)
	case doc.artifact != nil && c.other != nil:
		return nil, c.other // an artifact is chosen only if there is no image
	case doc.artifact != nil && c.local && doc.manifest.Subject != nil:
		return nil, notImage(errdefs.FailedPrecondition("artifact of type %q belongs to %s", doc.artifact.Type,
			errdefs.Clip(doc.manifest.Subject.Digest.String())))
	case doc.artifact != nil:
		img, err = doc.image()
	default:
		if img, err = c.config(doc.manifest); err == nil {
			err = checkConfigPlatform(img.Config, c.node, unstated)
		}
	}
	if err != nil {
		return nil, err
	}
	img.Documents = append([]Document{{d, doc.raw}}, img.Documents...)
	return img, nil
}

// best returns the image of the manifest in an index that suits the node best. Only its
// configuration tells the platform of a manifest without one. So the next is tried if that differs.
func (c *choice) best(index []ocispec.Descriptor, depth int) (*Image, error) {
	failed := error(&otherPlatformError{
		errdefs.NotFound("no image for platform %s in the index %s", platforms.Format(c.node), c.top)})
	for rest := slices.Clone(index); ; {
		m, ok := choosePlatform(rest, c.node)
		if !ok {
			return nil, failed
		}
		doc, err := c.read(m)
		missing := c.local && errdefs.IsNotFound(err)
		var img *Image
		if err == nil {
			img, err = c.imageOf(doc, m.Digest, m.Platform == nil, depth+1)
		}
		var other *otherPlatformError
		differs := m.Platform == nil && errors.As(err, &other)
		if !missing && !differs {
			return img, err
		}
		if len(rest) == len(index) {
			failed = err
		}
		if differs {
			c.other = cmp.Or(c.other, err)
			if c.failed++; c.failed >= maxFailed {
				return nil, failed
			}
		}
		rest = slices.DeleteFunc(rest, func(d ocispec.Descriptor) bool { return d.Digest == m.Digest })
	}
}

// otherPlatformError says that an image is for another platform.
type otherPlatformError struct{ error }

func (e *otherPlatformError) Unwrap() error { return e.error }

// checkConfigPlatform rejects an image of another operating system. If no index stated the
// platform of its manifest (unstated), it also rejects an image of another architecture. A direct
// reference to such an image is accepted, because the node may have an emulator.
//
// As in containerd, a configuration that names no operating system is for this machine's system
// (platforms.Normalize). A configuration that names no architecture matches no architecture.
func checkConfigPlatform(c ocispec.Image, node ocispec.Platform, unstated bool) error {
	if platforms.Normalize(c.Platform).OS != platforms.Normalize(node).OS {
		return &otherPlatformError{errdefs.FailedPrecondition("image is for %s, this node is %s",
			errdefs.Clip(platforms.Format(c.Platform)), platforms.Format(node))}
	}
	if !unstated || platforms.Only(node).Match(c.Platform) {
		return nil
	}
	return &otherPlatformError{errdefs.NotFound("no image for platform %s in the index", platforms.Format(node))}
}
