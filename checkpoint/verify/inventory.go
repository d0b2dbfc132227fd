package verify

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pidns"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// plainImages are images that only name values, which other checks or the kernel limit, or that
// CRIU does not read for a restore.
var plainImages = []string{
	"descriptors.json", "dump.log", "stats-dump", // not CRIU's, or only for people
	"filelocks.img", // locks of files that are open anyway
	"tty-data.img",  // bytes in terminals
	"timens-0.img",  // offsets of clocks
}

// checkNames accepts images that need no check.
func (c *check) checkNames() error {
	for _, name := range plainImages {
		c.images.read[name] = true
	}
	// IPC and UTS namespaces: CRIU sets limits of IPC and the hostname in a namespace of the
	// container. A joined namespace is left alone (join_ns). Shared memory, semaphores and queues
	// have other images, which are differences.
	for _, name := range c.images.names {
		if strings.HasPrefix(name, "ipcns-var-") || strings.HasPrefix(name, "utsns-") {
			c.images.read[name] = true
		}
	}
	return nil
}

// checkInventory checks the kind of the dump.
func (c *check) checkInventory() error {
	inv, err := oneOf[inventory.InventoryEntry](c.images, "inventory.img", "INVENTORY")
	if err != nil {
		return err
	}
	if v := inv.GetImgVersion(); v != 2 {
		c.differ("format of the images", fmt.Sprint(v), "2")
	}
	if plugins := inv.GetPluginsEntry().GetPlugins(); len(plugins) > 0 {
		c.differ("plugins of CRIU", strings.Join(plugins, ", "), "none")
	}
	if mode := inv.PreDumpMode; mode != nil {
		c.differ("incremental images", "yes", "no")
	}
	if !inv.GetFdinfoPerId() || !inv.GetNsPerId() {
		c.differ("format of the images", "that of an old CRIU", "one file per descriptor table and namespace")
	}
	c.criuIDs = inv.GetRootIds()
	if c.tree, err = entriesOf[pstree.PstreeEntry](c.images, "pstree.img", "PSTREE", nil); err != nil {
		return err
	}
	if len(c.tree) == 0 {
		return errors.New("no processes")
	}
	c.first, err = c.readIDs(c.tree[0].GetPid())
	if err != nil {
		return err
	}
	return c.checkExternal()
}

// readIDs reads the IDs of a process's namespaces and tables.
func (c *check) readIDs(pid uint32) (*criu_core.TaskKobjIdsEntry, error) {
	return oneOf[criu_core.TaskKobjIdsEntry](c.images, fmt.Sprintf("ids-%d.img", pid), "IDS")
}

// checkExternal checks that the images of network and PID namespaces only name the namespaces that
// the launcher passes (libcontainer's keys), so that CRIU creates and changes nothing there.
func (c *check) checkExternal() error {
	for _, ns := range []struct {
		prefix, kind, key string
		decode            func(name, kind string) (string, error)
	}{
		{"netns", "NETNS", "extRootNetNS", func(name, kind string) (string, error) {
			entry, err := oneOf[netdev.NetnsEntry](c.images, name, kind)
			return entry.GetExtKey(), err
		}},
		{"pidns", "PIDNS", "extRootPidNS", func(name, kind string) (string, error) {
			entry, err := oneOf[pidns.PidnsEntry](c.images, name, kind)
			return entry.GetExtKey(), err
		}},
	} {
		for _, name := range c.images.numbered(ns.prefix) {
			key, err := ns.decode(name, ns.kind)
			if err != nil {
				return err
			}
			if key != ns.key {
				c.differ("image "+name, "a namespace with content", "the namespace "+ns.key)
			}
		}
	}
	return nil
}

// namespaces are the kinds of namespaces with their IDs in the images.
var namespaces = []struct {
	kind specs.LinuxNamespaceType
	id   func(*criu_core.TaskKobjIdsEntry) uint32
}{
	{specs.PIDNamespace, (*criu_core.TaskKobjIdsEntry).GetPidNsId},
	{specs.NetworkNamespace, (*criu_core.TaskKobjIdsEntry).GetNetNsId},
	{specs.IPCNamespace, (*criu_core.TaskKobjIdsEntry).GetIpcNsId},
	{specs.UTSNamespace, (*criu_core.TaskKobjIdsEntry).GetUtsNsId},
	{specs.MountNamespace, (*criu_core.TaskKobjIdsEntry).GetMntNsId},
	{specs.UserNamespace, (*criu_core.TaskKobjIdsEntry).GetUserNsId},
	{specs.CgroupNamespace, (*criu_core.TaskKobjIdsEntry).GetCgroupNsId},
}

// hasNamespace reports whether the spec has a namespace of that kind.
func (c *check) hasNamespace(kind specs.LinuxNamespaceType) bool {
	is := func(n specs.LinuxNamespace) bool { return n.Type == kind }
	return slices.ContainsFunc(c.e.Spec.Linux.Namespaces, is)
}

// checkNamespaces compares the namespaces of a process with those of the spec and of the first
// process.
func (c *check) checkNamespaces(process string, ids *criu_core.TaskKobjIdsEntry) {
	for _, ns := range namespaces {
		own := ns.id(ids) != ns.id(c.criuIDs)
		expected := c.hasNamespace(ns.kind)
		field := fmt.Sprintf("%s: %s namespace", process, ns.kind)
		switch {
		case own != expected && own:
			c.differ(field, "one of its own", "the node's")
		case own != expected:
			c.differ(field, "the node's", "one of its own")
		case ns.id(ids) != ns.id(c.first):
			c.differ(field, "one of its own", "that of the first process")
		}
	}
	if own := ids.GetTimeNsId() != c.first.GetTimeNsId(); own {
		c.differ(process+": time namespace", "one of its own", "that of the first process")
	}
}
