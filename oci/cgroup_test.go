package oci

import (
	"path"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestCgroupPath(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"/kubepods/besteffort/pod1-2/abc":            "/kubepods/besteffort/pod1-2/abc",
		"kubepods-besteffort-pod1_2.slice:berth:abc": "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice/berth-abc.scope",
		"-.slice:berth:abc":                          "/-.slice/berth-abc.scope",
	} {
		if got := CgroupPath(in); got != want {
			t.Errorf("%s is %s, want %s", in, got, want)
		}
	}
}

func TestCgroupsPath(t *testing.T) {
	t.Parallel()
	const pod = "kubepods-besteffort-pod1_2.slice"
	for _, test := range []struct {
		parent, id string
		systemd    bool
		want, err  string
	}{
		{"", "abc", false, "/berth/abc", ""},
		{"/kubepods/besteffort/pod1-2", "abc", false, "/kubepods/besteffort/pod1-2/abc", ""},
		{"/", "abc", false, "/abc", ""},
		{"//a///b/", "abc", false, "/a/b/abc", ""},
		{"a/b", "abc", false, "", `"a/b"`},
		{"/a/../b", "abc", false, "", ".."},
		{"/..", "abc", false, "", ".."},
		{"/a\nb", "abc", false, "", "absolute path"},
		{"/a\x00b", "abc", false, "", "absolute path"},
		{"/kubepods.slice", "abc", false, "", "cgroupfs driver"},
		{"/a", "../abc", false, "", `"../abc"`},
		{"/a", "", false, "", `""`},
		{"/a", "x.slice", false, "", `"x.slice"`},
		{"/a", strings.Repeat("a", 129), false, "", "not an ID"},

		{"", "abc", true, "system.slice:berth:abc", ""},
		{pod, "abc", true, pod + ":berth:abc", ""},
		{"/kubepods.slice/kubepods-besteffort.slice/" + pod, "abc", true, pod + ":berth:abc", ""},
		{"-.slice", "abc", true, "-.slice:berth:abc", ""},
		{"/other.slice/" + pod, "abc", true, "", "kubepods-besteffort.slice"},
		{"/kubepods/pod1", "abc", true, "", "systemd driver"},
		{"a--b.slice", "abc", true, "", `"a--b.slice"`},
		{"-a.slice", "abc", true, "", `"-a.slice"`},
		{".slice", "abc", true, "", `".slice"`},
		{"a:b.slice", "abc", true, "", `"a:b.slice"`},
		{"a b.slice", "abc", true, "", `"a b.slice"`},
		{strings.Repeat("a", 250) + ".slice", "abc", true, "", "not the name of a slice"},
		{"a.slice", "a:b", true, "", `"a:b"`},
	} {
		t.Run(test.parent+" "+test.id, func(t *testing.T) {
			got, err := CgroupsPath(test.parent, test.id, test.systemd)
			if test.err != "" {
				testutil.WantError(t, err, codes.InvalidArgument, test.err)
			} else if err != nil || got != test.want {
				t.Errorf("%q, %q: got %q, %v, want %q", test.parent, test.id, got, err, test.want)
			}
		})
	}
}

func FuzzCgroupsPath(f *testing.F) {
	f.Add("/kubepods/pod1", "abc", false)
	f.Add("/kubepods.slice/kubepods-pod1.slice", "abc", true)
	f.Add("-.slice", "a..b", true)
	f.Fuzz(func(t *testing.T, parent, id string, systemd bool) {
		got, err := CgroupsPath(parent, id, systemd)
		if err != nil {
			if errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("code of %v", err)
			}
			return
		}
		if strings.ContainsAny(got, "\x00\n") {
			t.Errorf("%q", got)
		}
		if systemd {
			if strings.Count(got, ":") != 2 || strings.Contains(got, "/") || !strings.HasSuffix(got, ":"+id) {
				t.Errorf("%q", got)
			}
		} else if got != path.Clean(got) || path.Base(got) != id || !path.IsAbs(got) {
			t.Errorf("%q", got)
		}
	})
}
