package subject

import (
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"berth/integration/fixture"
)

// Berth starts the berth daemon of the programs in bin. It uses the distribution's CNI plugins or
// the built-in network. column is its name in the table, revision its commit. lines are added to
// its configuration.
func (at *Site) Berth(ctx context.Context, column, bin, revision string, builtInNetwork bool, lines ...string) (*Subject, error) {
	name := strings.ReplaceAll(column, " ", "-")
	if builtInNetwork {
		name += "-own"
	}
	d := at.dir(name)
	flags := []string{"--root", filepath.Join(at.Dir, name, "root"), "--state", d.state + "/state", "--listen", d.socket,
		"--cgroup-driver", "cgroupfs", "--log-level", "warn", "--cni-conf-dir", d.netd}
	if builtInNetwork {
		flags = append(flags, builtInNetworkFlag+"=berth-net")
	} else {
		plugins, err := at.network(d.netd)
		if err != nil {
			return nil, err
		}
		flags = append(flags, "--cni-bin-dir", plugins)
	}
	programs, err := filepath.Glob(filepath.Join(bin, "berth*"))
	if err != nil {
		return nil, err
	}
	inflates, err := berthInflates(ctx, bin)
	if err != nil {
		return nil, err
	}
	// Another daemon may use the default sockets and directories.
	config := fmt.Sprintf("nri_socket = %q\nnri_plugin_dir = %[2]q\nnri_plugin_config_dir = %[2]q\n", d.state+"/nri.sock", d.state+"/nri")
	if at.CRIU != "" {
		config += fmt.Sprintf("checkpoint.criu = %q\ncheckpoint.restore = \"trusted\"\n", at.CRIU)
	}
	if at.HTTP != "" {
		hosts := filepath.Join(at.Dir, name, "certs.d")
		if err := speakHTTP(hosts, at.HTTP); err != nil {
			return nil, err
		}
		flags = append(flags, "--registry-dir", hosts)
	}
	for _, line := range lines {
		config += line + "\n"
	}
	s := &Subject{Column: column, with: strings.TrimPrefix(revision+", gzip by "+inflates, ", "), BuiltInNetwork: builtInNetwork,
		Root: filepath.Join(at.Dir, name, "root"), state: d.state + "/state"}
	return at.start(ctx, s, recipe{
		name: name, programs: programs, config: config,
		args: func(bin, config string) []string {
			serve := []string{filepath.Join(bin, "berthd")}
			if _, err := os.Stat(serve[0]); err != nil { // a build of release 0.2
				serve = []string{filepath.Join(bin, "berth"), "serve"}
			}
			return append(append(serve, "--config", config), flags...)
		},
	})
}

// berthInflates returns the library that a build of berth inflates gzip with: ISA-L if berth-unpack
// was built for it and the library is installed, Go otherwise.
func berthInflates(ctx context.Context, bin string) (string, error) {
	info, err := buildinfo.ReadFile(filepath.Join(bin, "berth-unpack"))
	if err != nil {
		return "", err
	}
	libraries, err := exec.CommandContext(ctx, "ldconfig", "-p").Output()
	if err != nil {
		return "", fmt.Errorf("ldconfig -p: %w", err)
	}
	knowsISAL := slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool {
		return s.Key == "-tags" && slices.Contains(strings.Split(s.Value, ","), "isal")
	})
	if knowsISAL && strings.Contains(string(libraries), "libisal.so.2 ") {
		return "ISA-L", nil
	}
	return "Go", nil
}

// builtInNetworkFlag is the flag of the daemon that enables the built-in network.
const builtInNetworkFlag = "--network"

// HasBuiltInNetwork reports whether that build of berth has a network of its own.
func HasBuiltInNetwork(ctx context.Context, bin string) (bool, error) {
	help, err := exec.CommandContext(ctx, filepath.Join(bin, "berth"), "serve", "--help").Output()
	return strings.Contains(string(help), " "+builtInNetworkFlag+" "), err
}

// network writes a CNI configuration with a separate bridge and addresses for one runtime, and
// returns the plugins' directory.
func (at *Site) network(dir string) (string, error) {
	plugins, err := fixture.PluginDir()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return "", err
	}
	at.bridges++
	conflist := fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "bench%d",
  "plugins": [
    {
      "type": "bridge", "bridge": "bench%[1]d", "isGateway": true, "ipMasq": true, "hairpinMode": true,
      "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.%d.0.0/20"}]], "routes": [{"dst": "0.0.0.0/0"}]}
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, at.bridges, dir+"/addresses", 100+at.bridges)
	return plugins, os.WriteFile(filepath.Join(dir, "10-bench.conflist"), []byte(conflist), 0o600)
}
