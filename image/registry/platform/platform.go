// Package platform chooses, of the images that an index has, the one that suits a node. It is pure. Architectures are told by any of the names
// that are in use for them.
package platform

import (
	"runtime"
	"slices"
	"strconv"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Default is the platform this program runs on.
func Default() ocispec.Platform {
	return ocispec.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
}

// normalize spells a platform the way the OCI image spec does. The
// baseline variant of an architecture is spelled as none.
func normalize(p ocispec.Platform) ocispec.Platform {
	p.OS = strings.ToLower(p.OS)
	p.Architecture = strings.ToLower(p.Architecture)
	p.Variant = strings.ToLower(p.Variant)
	switch p.Architecture {
	case "x86_64", "x86-64":
		p.Architecture = "amd64"
	case "i386", "i486", "i586", "i686":
		p.Architecture = "386"
	case "aarch64":
		p.Architecture = "arm64"
	case "armhf":
		p.Architecture, p.Variant = "arm", "v7"
	case "armel":
		p.Architecture, p.Variant = "arm", "v6"
	}
	if p.Variant != "" && p.Variant[0] >= '0' && p.Variant[0] <= '9' {
		p.Variant = "v" + p.Variant
	}
	switch p.Architecture + "/" + p.Variant {
	case "amd64/v1", "arm64/v8", "arm64/v8.0":
		p.Variant = ""
	case "arm/":
		p.Variant = "v7"
	}
	return p
}

// runnable lists what a node of the given platform can run, best first: its own
// variant, lower ones, then the 32-bit sister of its architecture.
func runnable(node ocispec.Platform) []ocispec.Platform {
	node = normalize(node)
	with := func(arch, variant string) ocispec.Platform {
		return ocispec.Platform{OS: node.OS, Architecture: arch, Variant: variant}
	}
	var list []ocispec.Platform
	descend := func(arch string, from, to int) {
		for v := from; v >= to; v-- {
			list = append(list, with(arch, "v"+strconv.Itoa(v)))
		}
	}
	level, err := strconv.Atoi(strings.TrimPrefix(node.Variant, "v"))
	numbered := err == nil && level > 0 && level < 100
	switch {
	case node.Architecture == "amd64":
		if numbered {
			descend("amd64", level, 2)
		}
		list = append(list, with("amd64", ""), with("386", ""))
	case node.Architecture == "arm64":
		if numbered {
			descend("arm64", level, 9)
		} else if node.Variant != "" { // a minor version, like v8.2
			list = append(list, with("arm64", node.Variant))
		}
		list = append(list, with("arm64", ""))
		descend("arm", 8, 5)
	case node.Architecture == "arm" && numbered:
		descend("arm", level, 5)
	default:
		list = append(list, with(node.Architecture, node.Variant))
	}
	return list
}

// Choose picks the manifest of an index that suits the node best: the
// first of the most wanted platform; failing that, one that names no platform.
func Choose(manifests []ocispec.Descriptor, node ocispec.Platform) (ocispec.Descriptor, bool) {
	for _, want := range runnable(node) {
		for _, m := range manifests {
			if m.Platform != nil && same(*m.Platform, want) {
				return m, true
			}
		}
	}
	for _, m := range manifests {
		if m.Platform == nil {
			return m, true
		}
	}
	return ocispec.Descriptor{}, false
}

// Runs reports whether a node of the given platform can run what an image is for.
func Runs(node, image ocispec.Platform) bool {
	return slices.ContainsFunc(runnable(node), func(p ocispec.Platform) bool { return same(image, p) })
}

// SameOS reports whether both are of one operating system.
func SameOS(a, b ocispec.Platform) bool { return normalize(a).OS == normalize(b).OS }

func same(have, want ocispec.Platform) bool {
	have = normalize(have)
	return have.OS == want.OS && have.Architecture == want.Architecture && have.Variant == want.Variant
}

// String formats a platform as os/arch[/variant].
func String(p ocispec.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}
