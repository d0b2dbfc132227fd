package verify_test

import (
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	sk_opts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
)

// hostileSockets are changes of sockets.
var hostileSockets = []mutation{
	{"unix peer outside", "peer of a unix socket", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Usk != nil {
				e.Usk.Peer = proto.Uint32(12345)
			}
			return e.Usk != nil
		})
	}},
	{"socket in the node's network", "network namespace of a socket", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Isk != nil {
				e.Isk.NsId = proto.Uint32(2)
			}
			return e.Isk != nil
		})
	}},
	{"raw socket", "type of a socket", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Isk != nil {
				e.Isk.Type = proto.Uint32(unix.SOCK_RAW)
			}
			return e.Isk != nil
		})
	}},
	{"mark of a socket", "mark of a socket", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Isk != nil {
				proto.Merge(e.Isk.Opts, &sk_opts.SkOptsEntry{SoMark: proto.Uint32(1)})
			}
			return e.Isk != nil
		})
	}},
	{"large send buffer", "send buffer of a socket: the checkpoint has 134217728", func(t testing.TB, dir string) {
		setOptions(t, dir, &sk_opts.SkOptsEntry{SoSndbuf: proto.Uint32(128 << 20)})
	}},
	{"large receive buffer", "receive buffer of a socket: the checkpoint has 134217728", func(t testing.TB, dir string) {
		setOptions(t, dir, &sk_opts.SkOptsEntry{SoRcvbuf: proto.Uint32(128 << 20)})
	}},
	{"netlink protocol", "protocol of a netlink socket", func(t testing.TB, dir string) {
		openFile(t, dir, func(e *fdinfo.FileEntry) bool {
			if e.Nlsk != nil {
				e.Nlsk.Protocol = proto.Uint32(unix.NETLINK_AUDIT)
			}
			return e.Nlsk != nil
		})
	}},
}

// setOptions changes the options of an internet socket.
func setOptions(t testing.TB, dir string, options *sk_opts.SkOptsEntry) {
	t.Helper()
	openFile(t, dir, func(e *fdinfo.FileEntry) bool {
		if e.Isk != nil {
			proto.Merge(e.Isk.Opts, options)
		}
		return e.Isk != nil
	})
}

// TestPrivilegedPort checks the ports of sockets. They are limited where bind(2) limits them.
func TestPrivilegedPort(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		port, first uint32
		capable     bool
		difference  string
	}{
		{"port of a service", 443, 1024, false, "port of a socket: the checkpoint has 443, permitted is 1024 or more"},
		{"with the capability", 443, 1024, true, ""},
		{"that the pod permits", 443, 80, false, ""},
		{"first port", 80, 80, false, ""},
		{"no limit", 1, 0, false, ""},
		{"no port", 0, 1024, false, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := verifytest.Images(t, verifytest.Versions[0])
			openFile(t, dir, func(e *fdinfo.FileEntry) bool {
				if e.Isk != nil {
					e.Isk.SrcPort = proto.Uint32(tc.port)
				}
				return e.Isk != nil
			})
			expected := verifytest.Expected(t)
			expected.UnprivilegedPort = tc.first
			if !tc.capable {
				expected.Spec.Process.Capabilities.Effective = []string{"CAP_KILL"}
			}
			r, err := verify.Container(verifytest.Open(t, dir), expected)
			testutil.Must(t, err)
			all := ""
			for _, d := range r.Differences {
				all += d.String()
			}
			if tc.difference == "" && all != "" || !strings.Contains(all, tc.difference) {
				t.Errorf("differences %q", all)
			}
		})
	}
}
