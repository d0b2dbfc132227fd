package subject

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// unified is where cgroup v2 is mounted beside v1, in hybrid mode.
const unified = "/sys/fs/cgroup/unified"

// legacyCgroups returns a command that runs a daemon with cgroup v1 alone in its mount namespace.
// crun needs it since 1.9: it refuses hybrid mode with controllers in both versions.
func legacyCgroups(oci string) []string {
	if controllers, err := os.ReadFile(unified + "/cgroup.controllers"); oci != "crun" || err != nil || len(controllers) == 0 {
		return nil
	}
	return []string{"unshare", "--mount", "--propagation", "slave", "sh", "-c", "umount " + unified + ` && exec "$@"`, "sh"}
}

// containerdConfig is a format string. Its arguments are root, state, socket, sandbox image,
// registry directory, OCI runtime, CNI plugin and configuration directories, NRI socket and
// directory, and a directory that replaces one in /opt.
const containerdConfig = `version = 3
root = %[1]q
state = %[2]q

[grpc]
address = %[3]q

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %[4]q
[plugins.'io.containerd.cri.v1.images'.registry]
config_path = %[5]q

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true # a machine without CAP_SYS_RESOURCE lets nobody go below its own
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "oci"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.oci]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.oci.options]
BinaryName = %[6]q
SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%[7]q]
conf_dir = %[8]q

[plugins.'io.containerd.nri.v1.nri']
socket_path = %[9]q
plugin_path = %[10]q
plugin_config_path = %[10]q

[plugins.'io.containerd.internal.v1.opt']
path = %[11]q
`

// Containerd starts a containerd whose pods run under an OCI runtime: runc, or crun with runc's
// command line. peers holds the programs containerd and containerd-shim-runc-v2; ociRuntime is a
// path. registry is a host that speaks plain HTTP. sandboxImage contains pause.
func (at *Site) Containerd(ctx context.Context, peers, ociRuntime, registry, sandboxImage string) (*Subject, error) {
	oci := filepath.Base(ociRuntime)
	name := "containerd-" + oci
	d := at.dir(name)
	root := filepath.Join(at.Dir, name, "root")
	plugins, err := at.network(d.netd)
	if err != nil {
		return nil, err
	}
	hosts := filepath.Join(at.Dir, name, "certs.d")
	if err := speakHTTP(hosts, registry); err != nil {
		return nil, err
	}
	s := &Subject{Column: "containerd + " + oci, Root: root}
	version, err := versionOf(ctx, ociRuntime)
	if err != nil {
		return nil, err
	}
	s.with = version + ", gzip by " + containerdInflates()
	return at.start(ctx, s, recipe{
		name:       name,
		programs:   []string{filepath.Join(peers, "containerd"), filepath.Join(peers, "containerd-shim-runc-v2")},
		ociRuntime: ociRuntime,
		config: fmt.Sprintf(containerdConfig, root, d.state+"/state", d.socket, sandboxImage, hosts, filepath.Join(d.bin, oci), plugins, d.netd,
			d.state+"/nri.sock", d.state+"/nri", filepath.Join(at.Dir, name, "opt")),
		args: func(bin, config string) []string {
			return append(legacyCgroups(oci), filepath.Join(bin, "containerd"), "--config", config, "--log-level", "warn")
		},
	})
}

// versionOf returns the first line that a program prints with --version.
func versionOf(ctx context.Context, program string) (string, error) {
	version, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", program, err)
	}
	line, _, _ := strings.Cut(string(version), "\n")
	return line, nil
}

// containerdInflates returns what containerd inflates gzip with: the first of these programs in its
// PATH (gzipDecompress in its pkg/archive/compression, version 2.4).
func containerdInflates() string {
	for _, program := range []string{"igzip", "unpigz"} {
		if _, err := exec.LookPath(program); err == nil {
			return program
		}
	}
	return "Go"
}

// speakHTTP configures containerd to use plain HTTP for a registry. dir is containerd's directory
// of registries.
func speakHTTP(dir, registry string) error {
	if err := os.MkdirAll(filepath.Join(dir, registry), 0o755); err != nil {
		return err
	}
	host := fmt.Sprintf("server = %q\n[host.%[1]q]\n  capabilities = [\"pull\", \"resolve\"]\n", "http://"+registry)
	return os.WriteFile(filepath.Join(dir, registry, "hosts.toml"), []byte(host), 0o600)
}
