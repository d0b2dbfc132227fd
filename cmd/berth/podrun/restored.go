package podrun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"berth/cmd/berth/podyaml"
)

// Restored are the files of a pod that is restored from a checkpoint. They are in the directory of
// the pod's uid, so RemoveFiles removes them.
type Restored struct {
	UID    string
	LogDir string // has a directory for each container
	Hosts  string // file for /etc/hosts; empty until WriteHosts

	files *files
}

// MakeRestored creates the files of a restored pod below parent. If uid is empty, it makes a new
// one. The names are valid names of Kubernetes.
func MakeRestored(parent, uid, namespace, name string, containers []string) (*Restored, error) {
	if uid == "" {
		uid = newUID()
	}
	if !uidPattern.MatchString(uid) {
		return nil, fmt.Errorf("uid %q: want a UUID in lower case", uid)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	f := &files{dir: filepath.Join(parent, uid), pod: pod}
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of pods: %w", err)
	}
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of pod: %w", err)
	}
	r := &Restored{UID: uid, LogDir: f.logs(), Hosts: f.hosts(), files: f}
	if err := r.fill(containers); err != nil {
		return nil, errors.Join(err, f.remove())
	}
	return r, nil
}

func (r *Restored) fill(containers []string) error {
	for _, name := range containers {
		if err := r.files.makeLogDir(name); err != nil {
			return err
		}
	}
	return r.WriteHosts("", nil, false)
}

// WriteHosts writes the hosts file of a pod. With hostNetwork it copies the node's file.
func (r *Restored) WriteHosts(hostname string, podIPs []string, hostNetwork bool) error {
	plan := &podyaml.Plan{Pod: r.files.pod.DeepCopy()}
	plan.Pod.Spec.Hostname, plan.Pod.Spec.HostNetwork = hostname, hostNetwork
	if hostNetwork {
		var err error
		if plan.Host.EtcHosts, err = hostsFileOfNode(); err != nil {
			return err
		}
	}
	return r.files.writeHosts(plan.EtcHosts(podIPs))
}

// Remove removes the files.
func (r *Restored) Remove() error { return r.files.remove() }
