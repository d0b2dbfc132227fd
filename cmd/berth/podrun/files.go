package podrun

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	corev1 "k8s.io/api/core/v1"
)

// files are a pod's files on the host, below one directory named by its uid:
//
//	hosts                  /etc/hosts of its containers
//	volumes/<name>         emptyDir volumes (a tmpfs with medium Memory)
//	logs/<container>/0.log the container's log
type files struct {
	dir string
	pod *corev1.Pod
}

// makeFiles creates the pod's directory below parent.
func makeFiles(parent, uid string, pod *corev1.Pod) (*files, error) {
	f := &files{dir: filepath.Join(parent, uid), pod: pod}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of pod: %w", err)
	}
	return f, nil
}

func (f *files) hosts() string { return filepath.Join(f.dir, "hosts") }

// writeHosts writes the hosts file. It is world-readable even with a strict umask, because any user
// of a container may read it.
func (f *files) writeHosts(content []byte) error {
	if err := os.WriteFile(f.hosts(), content, 0o644); err != nil {
		return fmt.Errorf("write hosts file of pod: %w", err)
	}
	return os.Chmod(f.hosts(), 0o644)
}

func (f *files) logs() string { return filepath.Join(f.dir, "logs") }

// makeLogDir creates the directory of a container's log.
func (f *files) makeLogDir(container string) error {
	if err := os.MkdirAll(filepath.Join(f.logs(), container), 0o755); err != nil {
		return fmt.Errorf("create log directory of container: %w", err)
	}
	return nil
}

// remove removes the pod's directory with its content.
func (f *files) remove() error { return removeTree(f.dir) }

// uidPattern matches the uids of newUID, which are safe as file names.
var uidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// RemoveFiles removes the files of a detached pod. The caller has removed the pod. It does nothing
// for a pod that Run did not create.
func RemoveFiles(parent, uid string) error {
	if !uidPattern.MatchString(uid) {
		return nil
	}
	dir := filepath.Join(parent, uid)
	if info, err := os.Lstat(dir); err != nil || !info.IsDir() {
		return nil
	}
	return removeTree(dir)
}
