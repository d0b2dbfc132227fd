package podrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	corev1 "k8s.io/api/core/v1"
)

// files are a pod's files on the host, below one directory named by its uid:
//
//	pod.json                 the manifest, for stopping a detached pod
//	hosts                    /etc/hosts of its containers
//	volumes/<name>           emptyDir volumes (a tmpfs with medium Memory), and volumes with
//	                         files from the manifest (a tmpfs if they have Secrets)
//	subpaths/<container>/<n> the bind-mounted subPath of the n-th volume mount
//	logs/<container>/<n>.log the log of the n-th attempt, unless Config.LogDir is set
//
// The directories of persistent volume claims are beside it, in claims/<namespace>/<name>.
type files struct {
	dir    string
	claims string // parent of the claims' directories
	pod    *corev1.Pod
}

const (
	manifestFile = "pod.json"
	hostsFile    = "hosts"
)

// makeFiles creates the pod's directory below parent.
func makeFiles(parent, uid string, pod *corev1.Pod) (*files, error) {
	f := &files{dir: filepath.Join(parent, uid), claims: parent, pod: pod}
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of pod: %w", err)
	}
	if err := f.writeManifest(); err != nil {
		return nil, errors.Join(err, f.remove())
	}
	return f, nil
}

func (f *files) writeManifest() error {
	manifest, err := json.Marshal(f.pod)
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	return os.WriteFile(filepath.Join(f.dir, manifestFile), manifest, 0o600)
}

func (f *files) hosts() string { return filepath.Join(f.dir, hostsFile) }

// writeHosts writes the hosts file. It is world-readable whatever the umask, because any user of a
// container may read it.
func (f *files) writeHosts(content []byte) error {
	if err := os.WriteFile(f.hosts(), content, 0o644); err != nil {
		return fmt.Errorf("write hosts file of pod: %w", err)
	}
	return os.Chmod(f.hosts(), 0o644)
}

// makeLogDir creates the directory of the pod's logs, in the directory outside if one is given, and
// returns its path.
func (f *files) makeLogDir(outside string) (string, error) {
	dir := filepath.Join(f.dir, "logs")
	if outside != "" {
		dir = filepath.Join(outside, fmt.Sprintf("%s_%s_%s", f.pod.Namespace, f.pod.Name, filepath.Base(f.dir)))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("create log directory of pod: %w", err)
	}
	return filepath.Abs(dir)
}

func (f *files) makeContainerLogDir(logDir, container string) error {
	if err := os.MkdirAll(filepath.Join(logDir, container), 0o755); err != nil {
		return fmt.Errorf("create log directory of container: %w", err)
	}
	return nil
}

// remove removes the pod's directory with its content.
func (f *files) remove() error { return removeTree(f.dir) }

// uidPattern matches the uids of newUID, which are safe as file names.
var uidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// podDir returns the directory of a pod's files below parent, or false if Run did not create the
// uid or the directory does not exist.
func podDir(parent, uid string) (string, bool) {
	if !uidPattern.MatchString(uid) {
		return "", false
	}
	dir := filepath.Join(parent, uid)
	info, err := os.Lstat(dir)
	return dir, err == nil && info.IsDir()
}

// RemoveFiles removes the files of a detached pod. The caller has removed the pod. It does nothing
// for a pod that Run did not create.
func RemoveFiles(parent, uid string) error {
	dir, ok := podDir(parent, uid)
	if !ok {
		return nil
	}
	return removeTree(dir)
}

// loadManifest returns the manifest of a detached pod, or nil for a pod that Run did not create.
func loadManifest(parent, uid string) (*corev1.Pod, error) {
	dir, ok := podDir(parent, uid)
	if !ok {
		return nil, nil
	}
	raw, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read manifest of pod: %w", err)
	}
	manifest := &corev1.Pod{}
	if err := json.Unmarshal(raw, manifest); err != nil {
		return nil, fmt.Errorf("read manifest of pod: %w", err)
	}
	return manifest, nil
}
