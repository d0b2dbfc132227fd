package users

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

const testPasswd = `root:x:0:0:root:/root:/bin/sh
# comment:x:7:7::/:
app:x:1000:100:App:/home/app:/bin/sh
dup:x:1000:101::/home/dup:/bin/sh
broken:x:abc:0::/:/bin/sh
huge:x:4294967296:0::/:/bin/sh
minus:x:-1:0::/:/bin/sh
plus:x:+5:0::/:/bin/sh
badgid:x:12:zero::/:/bin/sh
short:x:13:13
1001:x:5:5::/five:/bin/sh
nohome:x:14:14::
`

const testGroup = `root:x:0:
staff:x:50:app,other
audio:x:29:other,app
appgroup:x:100:app
four:x:4294967296:app
bad:x:x:app
2000:x:77:
`

func id(n int64) *int64 { return &n }

func TestResolve(t *testing.T) {
	t.Parallel()
	strict := runtimeapi.SupplementalGroupsPolicy_Strict
	for _, test := range []struct {
		name string
		req  Request
		want User
	}{
		{name: "no request: root", want: User{Groups: []uint32{0}, Home: "/root"}},
		{name: "image name", req: Request{ImageUser: "app"},
			want: User{1000, 100, []uint32{29, 50, 100}, "/home/app"}},
		{name: "image ID with an entry", req: Request{ImageUser: "1000"},
			want: User{1000, 100, []uint32{29, 50, 100}, "/home/app"}},
		{name: "image ID without an entry", req: Request{ImageUser: "4711"}, want: User{4711, 0, []uint32{0}, ""}},
		{name: "ID 1 is 1", req: Request{ImageUser: "1"}, want: User{1, 0, []uint32{0}, ""}},
		{name: "leading zeros", req: Request{ImageUser: "007"}, want: User{7, 0, []uint32{0}, ""}},
		{name: "number is an ID, not a name", req: Request{ImageUser: "1001"}, want: User{1001, 0, []uint32{0}, ""}},
		{name: "name and group name", req: Request{ImageUser: "app:staff"},
			want: User{1000, 50, []uint32{29, 50, 100}, "/home/app"}},
		{name: "ID and group ID", req: Request{ImageUser: "5000:6000"}, want: User{5000, 6000, []uint32{6000}, ""}},
		{name: "ID and group name", req: Request{ImageUser: "5000:audio"}, want: User{5000, 29, []uint32{29}, ""}},
		{name: "group number is an ID, not a name", req: Request{ImageUser: "app:2000"},
			want: User{1000, 2000, []uint32{29, 50, 100, 2000}, "/home/app"}},
		{name: "group without user is root's", req: Request{ImageUser: ":audio"}, want: User{0, 29, []uint32{29}, "/root"}},
		{name: "empty group", req: Request{ImageUser: "app:"}, want: User{1000, 100, []uint32{29, 50, 100}, "/home/app"}},
		{name: "run_as_user wins over the image", req: Request{UID: id(4711), ImageUser: "app:staff"},
			want: User{4711, 0, []uint32{0}, ""}},
		{name: "run_as_user 0", req: Request{UID: id(0), ImageUser: "app"}, want: User{0, 0, []uint32{0}, "/root"}},
		{name: "run_as_user and group", req: Request{UID: id(1000), GID: id(3000)},
			want: User{1000, 3000, []uint32{29, 50, 100, 3000}, "/home/app"}},
		{name: "run_as_username", req: Request{Username: "app", ImageUser: "root"},
			want: User{1000, 100, []uint32{29, 50, 100}, "/home/app"}},
		{name: "supplemental, merged", req: Request{Username: "app", Groups: []int64{9000, 50, 9000, 4}},
			want: User{1000, 100, []uint32{4, 29, 50, 100, 9000}, "/home/app"}},
		{name: "supplemental, strict", req: Request{Username: "app", Groups: []int64{9000, 4}, Policy: strict},
			want: User{1000, 100, []uint32{4, 100, 9000}, "/home/app"}},
		{name: "highest ID", req: Request{UID: id(maxID), GID: id(maxID)}, want: User{maxID, maxID, []uint32{maxID}, ""}},
		{name: "entry without shell", req: Request{ImageUser: "short"}, want: User{13, 13, []uint32{13}, ""}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Resolve([]byte(testPasswd), []byte(testGroup), test.req)
			if err != nil || !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, %v, want %+v", got, err, test.want)
			}
		})
	}
}

func TestResolveRefuses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		req  Request
		err  string // a part of the InvalidArgument error
	}{
		{name: "unknown name", req: Request{ImageUser: "nobody"}, err: `"nobody"`},
		{name: "unknown group", req: Request{ImageUser: "app:wheel"}, err: `"wheel"`},
		{name: "unknown run_as_username", req: Request{Username: "ghost"}, err: `"ghost"`},
		{name: "comment is no user", req: Request{ImageUser: "# comment"}, err: `"# comment"`},
		{name: "user whose ID is no number", req: Request{ImageUser: "broken"}, err: `"broken"`},
		{name: "user whose ID wraps to 0", req: Request{ImageUser: "huge"}, err: `"huge"`},
		{name: "user with a negative ID", req: Request{ImageUser: "minus"}, err: `"minus"`},
		{name: "user with a signed ID", req: Request{ImageUser: "plus"}, err: `"plus"`},
		{name: "user with a bad group", req: Request{ImageUser: "badgid"}, err: `"badgid"`},
		{name: "group whose ID wraps to 0", req: Request{ImageUser: "app:four"}, err: `"four"`},
		{name: "2^32", req: Request{ImageUser: "4294967296"}, err: `"4294967296"`},
		{name: "2^32-1", req: Request{ImageUser: "4294967295"}, err: `"4294967295"`},
		{name: "2^31", req: Request{ImageUser: "2147483648"}, err: `"2147483648"`},
		{name: "2^64", req: Request{ImageUser: "18446744073709551616"}, err: `"18446744073709551616"`},
		{name: "negative", req: Request{ImageUser: "-1"}, err: `"-1"`},
		{name: "signed", req: Request{ImageUser: "+0"}, err: `"+0"`},
		{name: "group 2^32", req: Request{ImageUser: "0:4294967296"}, err: `"4294967296"`},
		{name: "two colons", req: Request{ImageUser: "a:b:c"}, err: `"a:b:c"`},
		{name: "colon in run_as_username", req: Request{Username: "app:root"}, err: `"app:root:"`},
		{name: "run_as_user negative", req: Request{UID: id(-1)}, err: "run_as_user -1"},
		{name: "run_as_user 2^32", req: Request{UID: id(1 << 32)}, err: "run_as_user 4294967296"},
		{name: "run_as_group 2^32", req: Request{UID: id(1), GID: id(1 << 32)}, err: "run_as_group 4294967296"},
		{name: "run_as_group alone", req: Request{GID: id(5), ImageUser: "app"}, err: "run_as_group 5 needs"},
		{name: "ID and name", req: Request{UID: id(5), Username: "app"}, err: "exclude"},
		{name: "supplemental negative", req: Request{Groups: []int64{-5}}, err: "supplemental_groups: -5"},
		{name: "unknown policy", req: Request{Policy: 9}, err: "supplemental_groups_policy"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Resolve([]byte(testPasswd), []byte(testGroup), test.req)
			testutil.WantError(t, err, codes.InvalidArgument, test.err)
			if !reflect.DeepEqual(got, User{}) {
				t.Errorf("error, but also user %+v", got)
			}
		})
	}
}

func TestResolveWithoutFiles(t *testing.T) {
	t.Parallel()
	u, err := Resolve(nil, nil, Request{ImageUser: "12:34"})
	if err != nil || u.UID != 12 || u.GID != 34 {
		t.Errorf("got %+v, %v", u, err)
	}
	_, err = Resolve(nil, nil, Request{ImageUser: "app"})
	testutil.WantError(t, err, codes.InvalidArgument, `"app"`, "/etc/passwd")
}

func TestResolveTooManyGroups(t *testing.T) {
	t.Parallel()
	var group strings.Builder
	for i := range maxGroups + 1 {
		fmt.Fprintf(&group, "g%d:x:%d:root\n", i, i)
	}
	_, err := Resolve([]byte(testPasswd), []byte(group.String()), Request{})
	testutil.WantError(t, err, codes.InvalidArgument, "65537 groups")
}

func TestRequests(t *testing.T) {
	t.Parallel()
	sc := &runtimeapi.LinuxContainerSecurityContext{
		RunAsUser: &runtimeapi.Int64Value{Value: 0}, RunAsGroup: &runtimeapi.Int64Value{Value: 7},
		SupplementalGroups: []int64{1}, SupplementalGroupsPolicy: runtimeapi.SupplementalGroupsPolicy_Strict,
	}
	req := ContainerRequest(sc, "img")
	if req.UID == nil || *req.UID != 0 || *req.GID != 7 || req.ImageUser != "img" || req.Policy != sc.SupplementalGroupsPolicy {
		t.Errorf("got %+v", req)
	}
	if req := ContainerRequest(nil, ""); req.UID != nil || req.GID != nil {
		t.Errorf("nil context asks for %+v", req)
	}
	if req := SandboxRequest(&runtimeapi.LinuxSandboxSecurityContext{RunAsGroup: sc.RunAsGroup}, ""); *req.GID != 7 {
		t.Errorf("got %+v", req)
	}
}

func TestCRI(t *testing.T) {
	t.Parallel()
	got := User{UID: 5, GID: 6, Groups: []uint32{6, 7}}.CRI().GetLinux()
	if got.GetUid() != 5 || got.GetGid() != 6 || !slices.Equal(got.GetSupplementalGroups(), []int64{6, 7}) {
		t.Errorf("got %v", got)
	}
}

func FuzzResolve(f *testing.F) {
	f.Add([]byte(testPasswd), []byte(testGroup), "app:staff")
	f.Add([]byte("a:x:00000000000000000000001:1::/:"), []byte("g::1:a,,a"), "a")
	f.Add([]byte(":::::::\x00\n::\n"), []byte("\xff:x:1:"), "\x00")
	f.Fuzz(func(t *testing.T, passwd, group []byte, image string) {
		u, err := Resolve(passwd, group, Request{ImageUser: image})
		if err != nil {
			if errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("code of %v", err)
			}
			return
		}
		if u.UID > maxID || u.GID > maxID || !slices.IsSorted(u.Groups) || !slices.Contains(u.Groups, u.GID) {
			t.Errorf("got %+v", u)
		}
		name, _, _ := strings.Cut(image, ":")
		numeric := strings.Trim(name, "0123456789") == ""
		if numeric && name != "" && strings.TrimLeft(name, "0") != strings.TrimLeft(fmt.Sprint(u.UID), "0") {
			t.Errorf("user %q became %d", name, u.UID)
		}
		if !numeric && !bytes.Contains(passwd, []byte(name)) {
			t.Errorf("user %q is not in passwd, but became %+v", name, u)
		}
		if h := u.HomeVariable(); !strings.HasPrefix(h, "/") || strings.ContainsAny(h, "\n\r\x00") {
			t.Errorf("home %q", h)
		}
	})
}
