package proto

import (
	"errors"
	"os"
	"slices"

	"berth/internal/rootfs"
)

var errFiles = errors.New("the message's files do not match its fields")

// rootfsSpecs returns the root filesystems of the request, the container's own first.
func (l *Launch) rootfsSpecs() []*rootfs.Spec {
	list := []*rootfs.Spec{&l.Rootfs}
	for i := range l.Volumes {
		list = append(list, &l.Volumes[i].Rootfs)
	}
	return list
}

// keep returns the files that the root filesystems need open, or none.
func (l *Launch) keep() []*os.File {
	for _, s := range l.rootfsSpecs() {
		if len(s.Keep) == KeptFDs {
			return s.Keep
		}
	}
	return nil
}

// takeKept cuts the files to keep off the files of a message, if it has them.
func takeKept(kept bool, files []*os.File) (keep, rest []*os.File, err error) {
	if !kept {
		return nil, files, nil
	}
	if len(files) < KeptFDs {
		return nil, nil, errFiles
	}
	return files[:KeptFDs], files[KeptFDs:], nil
}

// PassFiles returns the request in the form that is sent, the files to keep and the existing mounts
// of its layers, to send with it. With these mounts all containers of an image share one page
// cache. A message carries at most maxFDs files, and the launcher mounts the remaining layers
// itself. The caller still owns the files.
func (l *Launch) PassFiles() (*Launch, []*os.File) {
	request := *l
	request.Volumes = slices.Clone(l.Volumes)
	files := slices.Clone(l.keep())
	request.Kept = len(files) > 0
	for _, s := range request.rootfsSpecs() {
		s.Layers = slices.Clone(s.Layers)
		for i := range s.Layers {
			if mount := s.Layers[i].Mount; mount != nil && len(files) < maxFDs {
				s.Layers[i].Passed = true
				files = append(files, mount)
			}
		}
	}
	return &request, files
}

// TakeFiles assigns the files that came with the request to its layers.
func (l *Launch) TakeFiles(files []*os.File) (err error) {
	if l.Keep, files, err = takeKept(l.Kept, files); err != nil {
		return err
	}
	for _, s := range l.rootfsSpecs() {
		for i := range s.Layers {
			if !s.Layers[i].Passed {
				continue
			}
			if len(files) == 0 {
				return errFiles
			}
			s.Layers[i].Mount, files = files[0], files[1:]
		}
	}
	if len(files) > 0 {
		return errFiles
	}
	return nil
}

// streams returns the fields of the request's streams, ordered as the bits of Streams.
func (e *Exec) streams() []**os.File { return []**os.File{&e.Stdin, &e.Stdout, &e.Stderr} }

// PassFiles returns the request in the form that is sent, and the streams to send with it. The
// caller still owns them.
func (e *Exec) PassFiles() (*Exec, []*os.File) {
	request := *e
	request.CgroupsPath, request.SystemdCgroup = "", false
	var files []*os.File
	if len(e.Keep) == KeptFDs {
		files = slices.Clone(e.Keep)
	}
	request.Kept = len(files) > 0
	for i, f := range e.streams() {
		if *f != nil {
			request.Passed |= 1 << i
			files = append(files, *f)
		}
	}
	return &request, files
}

// TakeFiles assigns the files that came with the request to its streams.
func (e *Exec) TakeFiles(files []*os.File) (err error) {
	if e.Keep, files, err = takeKept(e.Kept, files); err != nil {
		return err
	}
	for i, f := range e.streams() {
		if e.Passed&(1<<i) == 0 {
			continue
		}
		if len(files) == 0 {
			return errFiles
		}
		*f, files = files[0], files[1:]
	}
	if len(files) > 0 {
		return errFiles
	}
	return nil
}
