package registry

import (
	"runtime"
	"slices"
	"strconv"

	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/cpu"
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
