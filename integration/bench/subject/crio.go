package subject

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// crioConfig is a format string. Its arguments are root, state, socket, signature policy, sandbox
// image, registry, CNI plugin and configuration directories, and directory of programs.
const crioConfig = `[crio]
root = %[1]q
runroot = "%[2]s/run"
storage_driver = "overlay"
version_file = "%[2]s/version"
version_file_persist = "%[1]s/version"
clean_shutdown_file = "%[1]s/clean.shutdown"

[crio.api]
listen = %[3]q
stream_port = "0"

[crio.runtime]
default_runtime = "crun"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
log_level = "warn"
pinns_path = "%[9]s/pinns"
namespaces_dir = "%[2]s/ns"
container_exits_dir = "%[2]s/exits"
container_attach_socket_dir = "%[2]s/attach"
[crio.runtime.runtimes.crun]
runtime_path = "%[9]s/crun"
runtime_root = "%[2]s/crun"
monitor_path = "%[9]s/conmon"
monitor_cgroup = "pod"

[crio.image]
signature_policy = %[4]q
pause_image = %[5]q
pause_command = "/pause"
insecure_registries = [%[6]q]

[crio.network]
plugin_dirs = [%[7]q]
network_dir = %[8]q

[crio.nri]
enable_nri = false
`

// CRIO starts a CRI-O whose pods run under crun with conmon, its defaults. peers holds the programs
// crio and pinns; crun and conmon are paths. registry is a host that speaks plain HTTP.
// sandboxImage contains pause.
func (at *Site) CRIO(ctx context.Context, peers, crun, conmon, registry, sandboxImage string) (*Subject, error) {
	const name = "cri-o"
	d := at.dir(name)
	root := filepath.Join(at.Dir, name, "root")
	plugins, err := at.network(d.netd)
	if err != nil {
		return nil, err
	}
	policy := filepath.Join(at.Dir, name, "policy.json")
	if err := os.WriteFile(policy, []byte(`{"default": [{"type": "insecureAcceptAnything"}]}`), 0o600); err != nil {
		return nil, err
	}
	s := &Subject{Column: "CRI-O + crun", Root: root}
	for _, program := range []string{crun, conmon} {
		version, err := versionOf(ctx, program)
		if err != nil {
			return nil, err
		}
		s.with = strings.TrimPrefix(s.with+", "+version, ", ")
	}
	return at.start(ctx, s, recipe{
		name:       name,
		programs:   []string{filepath.Join(peers, "crio"), filepath.Join(peers, "pinns"), conmon},
		ociRuntime: crun,
		config:     fmt.Sprintf(crioConfig, root, d.state+"/state", d.socket, policy, sandboxImage, registry, plugins, d.netd, d.bin),
		args: func(bin, config string) []string {
			return append(legacyCgroups("crun"), filepath.Join(bin, "crio"), "--config", config, "--config-dir", "")
		},
	})
}
