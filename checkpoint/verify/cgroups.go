package verify

import (
	"fmt"
	"path"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
)

// checkCgroups checks that every set of cgroups is the one that CRIU replaces by the container's: it
// replaces the path of a controller's first directory at the start of a member's path. With another
// path, a process would be put outside the container's cgroup.
func (c *check) checkCgroups() error {
	c.cgroups = map[uint32]bool{}
	if !c.images.has("cgroup.img") {
		c.differ("cgroups", "none", "the container's")
		return nil
	}
	entry, err := oneOf[cgroup.CgroupEntry](c.images, "cgroup.img", "CGROUP")
	if err != nil {
		return err
	}
	roots := map[string]string{} // path of the container's cgroup by controller
	for _, ctl := range entry.GetControllers() {
		if err := c.checkController(ctl, roots); err != nil {
			return err
		}
	}
	for _, set := range entry.GetSets() {
		c.cgroups[set.GetId()] = true
		for _, member := range set.GetCtls() {
			c.checkMember(member, roots)
		}
	}
	return nil
}

// checkController adds the path of a hierarchy's only directory to roots.
func (c *check) checkController(ctl *cgroup.CgControllerEntry, roots map[string]string) error {
	names := strings.Join(ctl.GetCnames(), ",")
	dirs := ctl.GetDirs()
	if len(dirs) != 1 {
		c.differ("cgroup of "+names, fmt.Sprintf("%d directories", len(dirs)), "one")
		return nil
	}
	if len(dirs[0].GetChildren()) > 0 {
		c.differ("cgroup of "+names, "cgroups below the container's", "none")
	}
	for _, name := range ctl.GetCnames() {
		if _, ok := roots[name]; ok {
			c.differ("cgroup of "+name, "two hierarchies", "one")
		}
		roots[name] = path.Join("/", dirs[0].GetDirName())
	}
	return nil
}

func (c *check) checkMember(member *cgroup.CgMemberEntry, roots map[string]string) {
	name, at := member.GetName(), member.GetPath()
	root, ok := roots[name]
	switch {
	case !ok && at != "/":
		// CRIU puts a process into a cgroup only of the hierarchies that the images describe.
		c.differ("cgroup of "+name, at, "a described one")
	case ok && at != root:
		c.differ("cgroup of "+name, at, root)
	case int(member.GetCgnsPrefix()) > len(at):
		c.differ("cgroup namespace of "+name, fmt.Sprint(member.GetCgnsPrefix()), fmt.Sprint(len(at)))
	}
}

// checkCgroupSet checks the set of a thread.
func (c *check) checkCgroupSet(process string, set *uint32) {
	if set == nil || !c.cgroups[*set] {
		c.differ(process+": cgroup", "an unknown one", "the container's")
	}
}
