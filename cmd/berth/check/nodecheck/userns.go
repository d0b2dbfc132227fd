package nodecheck

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"berth/internal/rootfs"
	"berth/internal/userns"
	"berth/sandbox/state"
	"berth/shim/payload"
)

// checkUserNamespaces performs the daemon's own probe for pods' user namespaces, in the daemon's
// directory.
func checkUserNamespaces(_ context.Context, n *Node) []Finding {
	const subject = "user namespaces"
	if limit, err := n.value("/proc/sys/user/max_user_namespaces"); err != nil || limit == "0" {
		return []Finding{
			lacking(
				Warning,
				subject,
				"not allowed",
				"set the sysctl user.max_user_namespaces: without it pods with hostUsers: false fail",
			),
		}
	}
	if err := userns.CheckPassable(nearest(state.Dirs{State: n.Config.State}.RootPlace())); err != nil {
		return []Finding{
			lacking(Warning, subject, err.Error(), "chmod o+x: without it pods with hostUsers: false are refused"),
		}
	}
	if err := tryUserNamespace(nearest(n.Config.Root)); err != nil {
		return []Finding{lacking(
			Warning,
			subject,
			err.Error(),
			"they need Linux 6.3, and root on a file system that has ID-mapped mounts: pods with hostUsers: false are refused without",
		)}
	}
	return []Finding{ok(subject, "supported, with ID-mapped mounts on %s", nearest(n.Config.Root))}
}

func tryUserNamespace(dir string) (err error) {
	dir, err = os.MkdirTemp(dir, ".berth-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	programs, err := payload.Install(filepath.Join(dir, "bin"))
	if err != nil {
		return err
	}
	return rootfs.ProbeUserNamespace(programs.Pause+payload.PauseProgram, dir)
}
