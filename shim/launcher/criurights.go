package launcher

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runc/libcontainer/keys"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// restoringRights are the capabilities that CRIU uses for a restore, beside those that the
// container has. They were found by tests with containers that had no capabilities. CRIU itself
// asks for CAP_SYS_RESOURCE. The last five are for files and processes of other users than root.
var restoringRights = []capability.Cap{
	capability.CAP_SYS_ADMIN,    // mounts, namespaces, process IDs
	capability.CAP_SYS_PTRACE,   // the restored processes
	capability.CAP_SYS_CHROOT,   // the container's root
	capability.CAP_SYS_RESOURCE, // limits, oom_score_adj, the places in a process's memory
	capability.CAP_SYS_TIME,     // clocks of a time namespace
	capability.CAP_SETPCAP,      // the bounding set
	capability.CAP_SETUID,
	capability.CAP_SETGID,
	capability.CAP_NET_ADMIN, // sizes of socket buffers
	capability.CAP_MKNOD,     // devices in /dev
	capability.CAP_DAC_OVERRIDE,
	capability.CAP_CHOWN,
	capability.CAP_FOWNER,
	capability.CAP_FSETID,
	capability.CAP_KILL,
}

// limitCRIU gives the program that this thread starts next fewer rights than this thread has. It is
// defence in depth. The thread must be locked and end afterwards.
func (b *restoreBackend) limitCRIU() error {
	if err := b.joinKeyring(); err != nil {
		return err
	}
	return b.dropRights()
}

// joinKeyring gives this thread a separate session keyring for the container, which CRIU and the
// restored processes inherit. Its name is the one that libcontainer uses for a new container, so
// that execs join it.
func (b *restoreBackend) joinKeyring() error {
	failpoint.Reach("launcher.join-keyring")
	_, err := keys.JoinSessionKeyring("_ses." + b.ID)
	failpoint.Reach("launcher.keyring-joined")
	if errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return err
}

// uselessInside are the capabilities in restoringRights that are useless in a pod's user namespace.
var uselessInside = []capability.Cap{capability.CAP_NET_ADMIN, capability.CAP_SYS_TIME, capability.CAP_MKNOD}

// needless returns the capabilities that are not in needed, CRIU's list, and that the container
// does not have. If the spec has no capabilities, it returns none.
func (b *restoreBackend) needless(needed []capability.Cap) ([]capability.Cap, error) {
	given := b.Spec.Process.Capabilities
	if given == nil {
		return nil, nil
	}
	all, err := capability.ListSupported()
	if err != nil {
		return nil, fmt.Errorf("list capabilities: %w", err)
	}
	return slices.DeleteFunc(all, func(c capability.Cap) bool {
		return slices.Contains(needed, c) || slices.Contains(given.Bounding, "CAP_"+strings.ToUpper(c.String()))
	}), nil
}

// dropRights removes the needless capabilities from this thread's bounding set.
func (b *restoreBackend) dropRights() error {
	drop, err := b.needless(restoringRights)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.drop-capabilities")
	err = capability.DropBound(drop...)
	failpoint.Reach("launcher.capabilities-dropped")
	if err != nil {
		return fmt.Errorf("limit the capabilities of CRIU: %w", err)
	}
	return nil
}
