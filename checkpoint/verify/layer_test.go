package verify_test

import (
	"archive/tar"
	"bytes"
	"math"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"berth/checkpoint/verify"
	"berth/internal/testutil"
)

func tarOf(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for _, h := range headers {
		testutil.Must(t, w.WriteHeader(&h))
	}
	testutil.Must(t, w.Close())
	return data.Bytes()
}

// withBounding returns the capabilities of a user that could get all by default, and has ambient
// ones.
func withBounding(ambient []string) *specs.LinuxCapabilities {
	all := []string{"CAP_CHOWN", "CAP_KILL", "CAP_MKNOD", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETUID"}
	return &specs.LinuxCapabilities{Bounding: all, Permitted: all, Effective: all, Inheritable: ambient, Ambient: ambient}
}

// TestLayer checks privileged files: a container can make them only with the right user or
// capability.
func TestLayer(t *testing.T) {
	t.Parallel()
	xattr := func(name string) map[string]string { return map[string]string{"SCHILY.xattr." + name: "x"} }
	for _, tc := range []struct {
		name       string
		header     tar.Header
		capability string // that permits it; empty: none does
		difference string // empty: permitted without capability
	}{
		{"file", tar.Header{Typeflag: tar.TypeReg, Mode: 0o777}, "", ""},
		{"own set-user-ID file", tar.Header{Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 1000}, "", ""},
		{"own set-group-ID file", tar.Header{Typeflag: tar.TypeReg, Mode: 0o2755, Gid: 2000}, "", ""},
		{"set-group-ID file of another own group", tar.Header{Typeflag: tar.TypeReg, Mode: 0o2755, Gid: 3000}, "", ""},
		{"set-group-ID directory of the image", tar.Header{Typeflag: tar.TypeDir, Mode: 0o2775, Gid: 8}, "", ""},
		{"FIFO", tar.Header{Typeflag: tar.TypeFifo, Mode: 0o600}, "", ""},
		{"attribute of a user", tar.Header{Typeflag: tar.TypeReg, PAXRecords: xattr("user.x")}, "", ""},
		{"access list", tar.Header{Typeflag: tar.TypeReg, PAXRecords: xattr("system.posix_acl_access")}, "", ""},
		{"set-user-ID file of root", tar.Header{Typeflag: tar.TypeReg, Mode: 0o4755}, "CAP_SETUID",
			"file f: the checkpoint has the set-user-ID bit for user 0, permitted is user 1000"},
		{"set-user-ID file of another user", tar.Header{Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 7}, "CAP_CHOWN",
			"file f: the checkpoint has the set-user-ID bit for user 7, permitted is user 1000"},
		{"set-group-ID file of root", tar.Header{Typeflag: tar.TypeReg, Mode: 0o2755}, "CAP_SETGID",
			"file f: the checkpoint has the set-group-ID bit for group 0, permitted is a group of the container's user"},
		{"set-user-ID bit of a link", tar.Header{Typeflag: tar.TypeLink, Linkname: "x", Mode: 0o4755}, "CAP_CHOWN",
			"file f: the checkpoint has the set-user-ID bit for user 0, permitted is user 1000"},
		{"file capabilities", tar.Header{Typeflag: tar.TypeReg, PAXRecords: xattr("security.capability")}, "CAP_SETFCAP",
			"file f: the checkpoint has capabilities of a file, permitted is none (no CAP_SETFCAP)"},
		{"disk", tar.Header{Typeflag: tar.TypeBlock, Devmajor: 8}, "CAP_MKNOD",
			"file f: the checkpoint has the device 8:0, permitted is a file (no CAP_MKNOD)"},
		{"memory", tar.Header{Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 1}, "CAP_MKNOD",
			"file f: the checkpoint has the device 1:1, permitted is a file (no CAP_MKNOD)"},
		{"attribute of overlayfs", tar.Header{Typeflag: tar.TypeDir, PAXRecords: xattr("trusted.overlay.redirect")}, "",
			"file f: the checkpoint has the extended attribute trusted.overlay.redirect, permitted is attributes of users"},
		{"set-user-ID file of a contiguous type", tar.Header{Typeflag: tar.TypeCont, Mode: 0o4755}, "",
			"file f: the checkpoint has type '7', permitted is a file"},
		{"unknown type", tar.Header{Typeflag: 'V'}, "", "file f: the checkpoint has type 'V', permitted is a file"},
		{"security attribute", tar.Header{Typeflag: tar.TypeReg, PAXRecords: xattr("security.ima")}, "",
			"file f: the checkpoint has the extended attribute security.ima, permitted is attributes of users"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.header.Name = "f"
			archive := tarOf(t, tc.header)
			spec := &specs.Spec{Process: &specs.Process{User: specs.User{UID: 1000, GID: 2000, AdditionalGids: []uint32{3000}},
				Capabilities: withBounding(nil)}}
			testDifference(t, tc.difference)(verify.Layer(bytes.NewReader(archive), spec))
			shm := ""
			if tc.difference != "" || tc.header.Mode&0o6000 != 0 && tc.header.Typeflag != tar.TypeDir {
				shm = "file f"
			}
			d, err := verify.Shm(bytes.NewReader(archive))
			testutil.Must(t, err)
			if (len(d) > 0) != (shm != "") {
				t.Errorf("in /dev/shm: %q", d)
			}
			if tc.capability == "" {
				return
			}
			spec.Process.Capabilities = withBounding([]string{tc.capability})
			testDifference(t, "")(verify.Layer(bytes.NewReader(archive), spec))
		})
	}
}

func testDifference(t *testing.T, want string) func([]verify.Difference, error) {
	return func(d []verify.Difference, err error) {
		t.Helper()
		testutil.Must(t, err)
		if want == "" && len(d) > 0 || want != "" && (len(d) != 1 || d[0].String() != want) {
			t.Errorf("differences %q, want %q", d, want)
		}
	}
}

// TestBrokenLayer checks that what is no tar is an error.
func TestBrokenLayer(t *testing.T) {
	t.Parallel()
	good := tarOf(t, tar.Header{Name: "f", Typeflag: tar.TypeReg})
	for _, bad := range [][]byte{bytes.Repeat([]byte("x"), 1024), good[:100], {0x1f, 0x8b, 8}} {
		if d, err := verify.Layer(bytes.NewReader(bad), new(specs.Spec)); err == nil {
			t.Errorf("%.10q: %v", bad, d)
		}
	}
}

// FuzzLayer checks that arbitrary bytes are no crash.
func FuzzLayer(f *testing.F) {
	f.Add(tarOf(f, tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o6755}))
	f.Add(tarOf(f, tar.Header{Name: "f", Typeflag: tar.TypeBlock, Devmajor: math.MaxInt16,
		PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "x"}}))
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _ = verify.Shm(bytes.NewReader(data))
	})
}
