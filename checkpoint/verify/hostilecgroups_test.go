package verify_test

import (
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify"
	"berth/internal/testutil"
)

// setCgroups returns a change of the cgroups' image.
func setCgroups(do func(*cgroup.CgroupEntry)) func(testing.TB, string) {
	return func(t testing.TB, dir string) {
		change(t, dir, "cgroup.img", func(e *cgroup.CgroupEntry) bool { do(e); return true })
	}
}

// setHierarchy returns a change of the hierarchy of the controller pids and of its path.
func setHierarchy(do func(*cgroup.CgControllerEntry, *cgroup.CgMemberEntry)) func(testing.TB, string) {
	return setCgroups(func(e *cgroup.CgroupEntry) {
		for _, ctl := range e.GetControllers() {
			for _, member := range e.GetSets()[0].GetCtls() {
				if ctl.GetCnames()[0] == "pids" && member.GetName() == "pids" {
					do(ctl, member)
				}
			}
		}
	})
}

// hostileCgroups are changes of cgroups.
var hostileCgroups = []mutation{
	{"cgroup path", "cgroup of pids: the checkpoint has /, permitted is /c1",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.Path = proto.String("/") })},
	{"cgroup beside the container's", "cgroup of pids: the checkpoint has /c1x, permitted is /c1",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.Path = proto.String("/c1x") })},
	// CRIU would not replace /c1, because it does not start with the directory's name.
	{"directory that CRIU does not find in the path", "cgroup of pids: the checkpoint has ../c1, permitted is a clean path",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) { c.Dirs[0].DirName = proto.String("../c1") })},
	{"path with ..", "cgroup of pids: the checkpoint has c1/.., permitted is a clean path",
		setHierarchy(func(c *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) {
			c.Dirs[0].DirName, m.Path = proto.String("c1/.."), proto.String("/c1/..")
		})},
	{"absolute directory", "cgroup of pids: the checkpoint has /c1, permitted is a clean path",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) { c.Dirs[0].DirName = proto.String("/c1") })},
	{"nested cgroup", "cgroups below the container's",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) {
			c.Dirs[0].Children = []*cgroup.CgroupDirEntry{{DirName: proto.String("x")}}
		})},
	{"second directory", "cgroup of pids: the checkpoint has 2 directories",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) { c.Dirs = append(c.Dirs, c.Dirs[0]) })},
	{"owner of a cgroup", "cgroup of pids: owner: the checkpoint has 0:1000",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) {
			c.Dirs[0].DirPerms.Gid = proto.Uint32(1000)
		})},
	{"writable cgroup", "cgroup of pids: owner: the checkpoint has 0:0, mode 40777",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) {
			c.Dirs[0].DirPerms.Mode = proto.Uint32(0o40777)
		})},
	{"mount option as a controller", "cgroup of release_agent=/x: the checkpoint has release_agent=/x",
		setHierarchy(func(c *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) {
			c.Cnames, m.Name = []string{"release_agent=/x"}, proto.String("release_agent=/x")
		})},
	{"new hierarchy", "cgroup of name=x: the checkpoint has name=x, permitted is a controller",
		setHierarchy(func(c *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) {
			c.Cnames, m.Name = []string{"name=x"}, proto.String("name=x")
		})},
	{"hierarchy without controller", "the checkpoint has no controller",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) { c.Cnames = nil })},
	{"hierarchy twice", "cgroup of pids: the checkpoint has two hierarchies",
		setCgroups(func(e *cgroup.CgroupEntry) { e.Controllers = append(e.Controllers, e.Controllers...) })},
	{"undescribed hierarchy", "cgroup of pids: the checkpoint has /c1, permitted is a described one",
		setHierarchy(func(c *cgroup.CgControllerEntry, _ *cgroup.CgMemberEntry) { c.Cnames = []string{"memory"} })},
	{"two paths in a set", "two paths in a set",
		setCgroups(func(e *cgroup.CgroupEntry) { e.Sets[0].Ctls = append(e.Sets[0].Ctls, e.Sets[0].Ctls[0]) })},
	{"set twice", "cgroup set 2: the checkpoint has two entries",
		setCgroups(func(e *cgroup.CgroupEntry) { e.Sets = append(e.Sets, e.Sets[0]) })},
	{"namespace at the root of a hierarchy", "cgroup namespace of pids: the checkpoint has 0, permitted is 3",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.CgnsPrefix = proto.Uint32(0) })},
	{"namespace within a name", "cgroup namespace of pids: the checkpoint has 1, permitted is 3",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.CgnsPrefix = proto.Uint32(1) })},
	{"namespace beyond the path", "cgroup namespace of pids: the checkpoint has 4000000000, permitted is 3",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.CgnsPrefix = proto.Uint32(4e9) })},
	{"namespace that the spec lacks", "cgroup namespace: the checkpoint has true, permitted is false",
		setHierarchy(func(_ *cgroup.CgControllerEntry, m *cgroup.CgMemberEntry) { m.CgnsPrefix = proto.Uint32(3) })},
}

// TestNodeCgroups checks that the list of this node names what the kernel shows.
func TestNodeCgroups(t *testing.T) {
	t.Parallel()
	names, err := verify.NodeCgroups()
	testutil.Must(t, err)
	if len(names) == 0 {
		t.Error("no cgroups")
	}
}
