package process

import (
	"fmt"
	"path"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// restrictions are the options of mounts that restrict a container.
var restrictions = []string{"ro", "nosuid", "nodev", "noexec"}

// mountDifferences compares the mounts of a checkpointed container with those of a request. CRIU
// restores the mount points and flags that the container had, and only takes the sources of bind
// mounts from the request. So berth would silently ignore that a request restricts more or has
// other mount points.
func mountDifferences(have, want *specs.Spec) (differences []string) {
	differ := func(field, have, want string) {
		differences = append(differences, fmt.Sprintf("%s: the checkpoint has %s, the request %s", field, have, want))
	}
	if readOnlyRoot(want) && !readOnlyRoot(have) {
		differ("root filesystem", "a writable one", "a read-only one")
	}
	differences = append(differences, pointDifferences(lastMounts(have), lastMounts(want))...)
	masked, readOnly := protectedPaths(want)
	haveMasked, haveReadOnly := protectedPaths(have)
	for _, p := range masked {
		if !slices.Contains(haveMasked, p) {
			differ("masked path "+p, "none", "one")
		}
	}
	for _, p := range readOnly {
		if !slices.Contains(slices.Concat(haveMasked, haveReadOnly), p) {
			differ("read-only path "+p, "none", "one")
		}
	}
	return differences
}

// pointDifferences compares the topmost mount at each mount point.
func pointDifferences(have, want []specs.Mount) (differences []string) {
	differ := func(m specs.Mount, have, want string) {
		differences = append(differences, fmt.Sprintf("mount of %s: the checkpoint has %s, the request %s", m.Destination, have, want))
	}
	find := func(list []specs.Mount, at string) *specs.Mount {
		i := slices.IndexFunc(list, func(m specs.Mount) bool { return m.Destination == at })
		if i < 0 {
			return nil
		}
		return &list[i]
	}
	for _, m := range want {
		old := find(have, m.Destination)
		if old == nil {
			differ(m, "none", "one")
			continue
		}
		if kindOf(*old) != kindOf(m) {
			differ(m, kindOf(*old), kindOf(m))
		}
		for _, r := range restrictions {
			if restricts(m, r) && !restricts(*old, r) {
				differ(m, "no option "+r, r)
			}
		}
	}
	for _, m := range have {
		if find(want, m.Destination) == nil {
			differ(m, "one", "none")
		}
	}
	return differences
}

// lastMounts returns the mounts with clean paths. It leaves out mounts that a later mount covers.
func lastMounts(spec *specs.Spec) (list []specs.Mount) {
	for _, m := range spec.Mounts {
		m.Destination = path.Clean(m.Destination)
		list = slices.DeleteFunc(list, func(old specs.Mount) bool { return old.Destination == m.Destination })
		list = append(list, m)
	}
	return list
}

// kindOf returns the type of a mount. The type of a bind mount has several spellings.
func kindOf(m specs.Mount) string {
	if slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind") {
		return "bind"
	}
	return m.Type
}

// restricts reports whether a mount has a restriction, for itself or also for the mounts below it
// (rro).
func restricts(m specs.Mount, name string) bool {
	return slices.Contains(m.Options, name) || slices.Contains(m.Options, "r"+name)
}

func readOnlyRoot(spec *specs.Spec) bool { return spec.Root != nil && spec.Root.Readonly }

// protectedPaths returns the masked and the read-only paths of a spec.
func protectedPaths(spec *specs.Spec) (masked, readOnly []string) {
	if spec.Linux == nil {
		return nil, nil
	}
	clean := func(paths []string) (list []string) {
		for _, p := range paths {
			list = append(list, path.Clean(p))
		}
		return list
	}
	return clean(spec.Linux.MaskedPaths), clean(spec.Linux.ReadonlyPaths)
}
