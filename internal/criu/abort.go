package criu

import (
	"errors"
	"fmt"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
)

// Abortable makes the children of this process survive Abort. Call it before the start of CRIU.
func Abortable() { signal.Ignore(unix.SIGXFSZ) }

// Abort ends the dump of the CRIU in a cgroup, by a limit that forbids it to write to files. CRIU
// then fails at its next image, restores the processes that it has changed, and ends. A killed CRIU
// would not restore them. A process would continue in CRIU's code, and a signal would end the
// process. The caller waits for CRIU's end.
func Abort(dir string) error {
	pids, err := cgroup.ProcsIn(dir)
	if err != nil {
		return err
	}
	failpoint.Reach("criu.abort")
	for _, pid := range pids {
		err := unix.Prlimit(pid, unix.RLIMIT_FSIZE, &unix.Rlimit{}, nil)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("abort CRIU: %w", os.NewSyscallError("prlimit", err))
		}
	}
	failpoint.Reach("criu.aborted")
	return nil
}
