package verify

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// maxLayerFiles limits the files of a tar.
const maxLayerFiles = 1 << 20

// Layer compares the tar of a writable layer with what a process of the spec could have made: see
// the package doc. The error says that the tar cannot be read.
func Layer(r io.Reader, spec *specs.Spec) ([]Difference, error) {
	return checkLayer(r, layerCheck{Report: new(Report), e: Expected{Spec: spec}})
}

// Shm checks the tar of a /dev/shm, which all containers of a pod share. It must have no privileged
// files at all.
func Shm(r io.Reader) ([]Difference, error) {
	const nobody = 1<<32 - 1
	process := &specs.Process{User: specs.User{UID: nobody, GID: nobody}}
	return checkLayer(r, layerCheck{Report: new(Report), e: Expected{Spec: &specs.Spec{Process: process}}})
}

type layerCheck struct {
	*Report
	e Expected
}

func checkLayer(r io.Reader, c layerCheck) ([]Difference, error) {
	archive := tar.NewReader(r)
	for i := 0; ; i++ {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return c.Differences, nil
		}
		if err == nil && i == maxLayerFiles {
			err = fmt.Errorf("more than %d files", maxLayerFiles)
		}
		if err != nil {
			return nil, fmt.Errorf("read tar: %w", err)
		}
		c.checkFile("file "+h.Name, h)
	}
}

func (c layerCheck) checkFile(field string, h *tar.Header) {
	switch h.Typeflag {
	case tar.TypeChar, tar.TypeBlock:
		if !c.e.may(capability.CAP_MKNOD) {
			c.differ(field, fmt.Sprintf("the device %d:%d", h.Devmajor, h.Devminor), "a file (no CAP_MKNOD)")
		}
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeLink:
		c.checkSetID(field, h)
	case tar.TypeDir, tar.TypeSymlink, tar.TypeFifo:
	default: // package unpack may make a file of another type, such as TypeCont
		c.differ(field, fmt.Sprintf("type %q", h.Typeflag), "a file")
	}
	for record := range h.PAXRecords {
		if attr, ok := strings.CutPrefix(record, "SCHILY.xattr."); ok {
			c.checkAttribute(field, attr)
		}
	}
}

// checkSetID checks the bits of a program that runs as another user. The owner of a file can set
// them.
func (c layerCheck) checkSetID(field string, h *tar.Header) {
	user := c.e.Spec.Process.User
	chown := c.e.may(capability.CAP_CHOWN)
	if h.Mode&unix.S_ISUID != 0 && h.Uid != int(user.UID) && !chown && !c.e.may(capability.CAP_SETUID) {
		c.differ(field, fmt.Sprintf("the set-user-ID bit for user %d", h.Uid), fmt.Sprintf("user %d", user.UID))
	}
	own := h.Gid == int(user.GID) || slices.Contains(user.AdditionalGids, uint32(h.Gid))
	if h.Mode&unix.S_ISGID != 0 && !own && !chown && !c.e.may(capability.CAP_SETGID) {
		c.differ(field, fmt.Sprintf("the set-group-ID bit for group %d", h.Gid), "a group of the container's user")
	}
}

// checkAttribute refuses extended attributes that need a capability (xattr(7)).
func (c layerCheck) checkAttribute(field, attr string) {
	switch {
	case strings.HasPrefix(attr, "user."), attr == "system.posix_acl_access", attr == "system.posix_acl_default":
	case attr == "security.capability":
		if !c.e.may(capability.CAP_SETFCAP) {
			c.differ(field, "capabilities of a file", "none (no CAP_SETFCAP)")
		}
	default:
		c.differ(field, "the extended attribute "+attr, "attributes of users")
	}
}
