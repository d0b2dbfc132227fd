package podrun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"berth/cmd/berth/podyaml"
)

// DetectHost collects the facts about this machine that a plan needs.
func DetectHost(seccompRoot string) (podyaml.Host, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return podyaml.Host{}, fmt.Errorf("read the host's memory size: %w", err)
	}
	hosts, err := hostsFileOfNode()
	return podyaml.Host{Memory: int64(info.Totalram) * int64(info.Unit), EtcHosts: hosts, SeccompRoot: seccompRoot}, err
}

// hostsFileOfNode returns the node's hosts file, or nothing if it has none.
func hostsFileOfNode() ([]byte, error) {
	content, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the node's hosts file: %w", err)
	}
	return content, nil
}
