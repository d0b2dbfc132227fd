package archive

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
)

// ReadManifest reads the manifest of the archive from, a directory or a tar, and checks its
// signature as Import does. It copies nothing and does not check the other files, so the result
// only describes what the archive claims to be. The error is fs.ErrNotExist for an archive without
// a manifest.
func ReadManifest(from *os.File, key *Key) (*Archive, error) {
	s, err := open(from)
	if err != nil {
		return nil, err
	}
	data, err := s.manifest()
	if err != nil {
		return nil, err
	}
	m, signer, err := decodeManifest(data, key)
	if err != nil {
		return nil, err
	}
	return &Archive{Manifest: *m, Signer: signer}, nil
}

// open returns the source for a directory or a tar.
func open(from *os.File) (source, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: from.Name(), Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return directory{from}, nil
	case unix.S_IFREG:
		return tarFile{from, st.Size}, nil
	}
	return nil, errdefs.InvalidArgument("checkpoint: %s is neither a directory nor a regular file", from.Name())
}
