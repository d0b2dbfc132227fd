package control

import (
	"errors"
	"os"
	"slices"

	"berth/internal/rootfs"
)

// specs are the root filesystems of the order, the container's own first.
func (l *Launch) specs() []*rootfs.Spec {
	list := []*rootfs.Spec{&l.Rootfs}
	for i := range l.Volumes {
		list = append(list, &l.Volumes[i].Rootfs)
	}
	return list
}

// PassMounts returns the mounts of the order's layers that are there already, to be sent with it: the launcher uses these, so that
// all containers of an image have one page cache. Of many, the last are left out, which the launcher mounts itself. The
// files stay whose they are.
func (l *Launch) PassMounts() (files []*os.File) {
	l.Volumes = slices.Clone(l.Volumes)
	for _, s := range l.specs() {
		s.Layers = slices.Clone(s.Layers)
		for i := range s.Layers {
			if mount := s.Layers[i].Mount; mount != nil && len(files) < maxFDs {
				s.Layers[i].Passed = true
				files = append(files, mount)
			}
		}
	}
	return files
}

// TakeMounts gives the layers of the order the mounts that came with it.
func (l *Launch) TakeMounts(files []*os.File) error {
	for _, s := range l.specs() {
		for i := range s.Layers {
			if !s.Layers[i].Passed {
				continue
			}
			if len(files) == 0 {
				return errors.New("an order without the mounts that it is said to come with")
			}
			s.Layers[i].Mount, files = files[0], files[1:]
		}
	}
	if len(files) > 0 {
		return errors.New("an order with files that it is not said to come with")
	}
	return nil
}
