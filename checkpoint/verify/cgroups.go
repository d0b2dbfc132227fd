package verify

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// checkCgroups checks that every set of cgroups is the one that CRIU replaces by the container's:
// it replaces the path of a controller's first directory at the start of a member's path. With
// another path, a process would be put outside the container's cgroup.
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
		c.checkController(ctl, roots)
	}
	for _, set := range entry.GetSets() {
		if c.cgroups[set.GetId()] {
			c.differ(fmt.Sprintf("cgroup set %d", set.GetId()), "two entries", "one")
		}
		c.cgroups[set.GetId()] = true
		c.checkSet(set, roots)
	}
	return nil
}

// checkController adds the path of a hierarchy's only directory to roots. Its properties do not
// count: berth restores with the mode "soft", in which CRIU skips those of a cgroup that exists.
// But CRIU sets the owner and mode of the directory.
func (c *check) checkController(ctl *cgroup.CgControllerEntry, roots map[string]string) {
	field := "cgroup of " + strings.Join(ctl.GetCnames(), ",")
	c.checkHierarchy(field, ctl.GetCnames(), roots)
	dirs := ctl.GetDirs()
	if len(dirs) != 1 {
		c.differ(field, fmt.Sprintf("%d directories", len(dirs)), "one")
		return
	}
	if len(dirs[0].GetChildren()) > 0 {
		c.differ(field, "cgroups below the container's", "none")
	}
	at := dirs[0].GetDirName()
	if at != "" && (path.IsAbs(at) || path.Join("/", at) != "/"+at) {
		c.differ(field, at, "a clean path")
	}
	if p := dirs[0].GetDirPerms(); p != nil && (p.GetUid() != 0 || p.GetGid() != 0 || p.GetMode()&0o7022 != 0) {
		c.differ(field+": owner", fmt.Sprintf("%d:%d, mode %o", p.GetUid(), p.GetGid(), p.GetMode()), "0:0, mode 755")
	}
	for _, name := range ctl.GetCnames() {
		roots[name] = "/" + at
	}
}

// checkHierarchy checks the names of a hierarchy's controllers. CRIU mounts a hierarchy that it
// does not find, with the names as options: "release_agent=…" would run a program on the node.
func (c *check) checkHierarchy(field string, names []string, roots map[string]string) {
	if len(names) == 0 {
		c.differ(field, "no controller", "one")
	}
	for _, name := range names {
		if !slices.Contains(c.e.Cgroups, name) {
			c.differ(field, quoted(name), "a controller that this node has mounted")
		}
		if _, ok := roots[name]; ok {
			c.differ("cgroup of "+name, "two hierarchies", "one")
		}
	}
}

// checkSet checks that a set has each hierarchy once and leads to the container's cgroup.
func (c *check) checkSet(set *cgroup.CgSetEntry, roots map[string]string) {
	seen, ofNamespace := map[string]bool{}, false
	for _, member := range set.GetCtls() {
		if seen[member.GetName()] {
			c.differ("cgroup of "+member.GetName(), "two paths in a set", "one")
		}
		seen[member.GetName()] = true
		ofNamespace = ofNamespace || member.CgnsPrefix != nil
		c.checkMember(member, roots)
	}
	if want := c.hasNamespace(specs.CgroupNamespace); ofNamespace != want {
		c.differ("cgroup namespace", fmt.Sprint(ofNamespace), fmt.Sprint(want))
	}
}

// checkMember checks a path. CRIU replaces its start, the hierarchy's directory, by the container's
// cgroup. The root of a cgroup namespace must be that cgroup: CRIU moves a process there to make
// the namespace.
func (c *check) checkMember(member *cgroup.CgMemberEntry, roots map[string]string) {
	name, at := member.GetName(), member.GetPath()
	root, ok := roots[name]
	switch prefix := member.GetCgnsPrefix(); {
	case !ok && at != "/": // in a hierarchy that the images do not describe, CRIU moves nothing
		c.differ("cgroup of "+name, at, "a described one")
	case ok && at != root:
		c.differ("cgroup of "+name, at, root)
	case member.CgnsPrefix != nil && int(prefix) != len(at):
		c.differ("cgroup namespace of "+name, fmt.Sprint(prefix), fmt.Sprint(len(at)))
	}
}

// NodeCgroups returns the names of all controllers and hierarchies that have cgroups on this node,
// for Expected. libcontainer gives CRIU the container's cgroup in each of them.
func NodeCgroups() ([]string, error) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var names []string
	for line := range strings.Lines(string(data)) {
		if parts := strings.SplitN(line, ":", 3); len(parts) == 3 {
			names = append(names, strings.Split(parts[1], ",")...)
		}
	}
	return names, nil
}

// checkCgroupSet checks the set of a thread.
func (c *check) checkCgroupSet(process string, set *uint32) {
	if set == nil || !c.cgroups[*set] {
		c.differ(process+": cgroup", "an unknown one", "the container's")
	}
}
