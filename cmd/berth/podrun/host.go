package podrun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
	machine "berth/internal/host"
)

// DetectHost collects the facts about this machine and its runtime that a plan needs.
func DetectHost(ctx context.Context, c *client.Client, seccompRoot string) (podyaml.Host, error) {
	name, err := os.Hostname()
	if err != nil {
		return podyaml.Host{}, fmt.Errorf("read the host's name: %w", err)
	}
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return podyaml.Host{}, fmt.Errorf("read the host's memory size: %w", err)
	}
	host := podyaml.Host{
		NodeName: strings.ToLower(name), IPs: hostIPs(),
		CPUs: int64(runtime.NumCPU()), Memory: int64(info.Totalram) * int64(info.Unit),
		SeccompRoot: seccompRoot,
	}
	if host.ResolvConf, err = readIfThere(machine.ResolvConf("/")); err != nil {
		return podyaml.Host{}, err
	}
	if host.EtcHosts, err = readIfThere("/etc/hosts"); err != nil {
		return podyaml.Host{}, err
	}
	host.RecursiveReadOnly, err = recursiveReadOnly(ctx, c)
	return host, err
}

func readIfThere(path string) ([]byte, error) {
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return content, err
}

// recursiveReadOnly reports whether the runtime's default handler has the feature.
func recursiveReadOnly(ctx context.Context, c *client.Client) (bool, error) {
	reply, err := c.Status(ctx, &runtimeapi.StatusRequest{})
	if err != nil {
		return false, fmt.Errorf("status of the runtime: %w", err)
	}
	for _, h := range reply.GetRuntimeHandlers() {
		if h.GetName() == "" {
			return h.GetFeatures().GetRecursiveReadOnlyMounts(), nil
		}
	}
	return false, nil
}

// hostIPs returns this host's source addresses, one for each family with a default route.
// Connecting a UDP socket asks the kernel for the route without sending anything. The destinations
// are addresses reserved for documentation.
func hostIPs() []string {
	var ips []string
	for _, remote := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
		conn, err := net.Dial("udp", remote)
		if err != nil {
			continue // no route for this family
		}
		if local, ok := conn.LocalAddr().(*net.UDPAddr); ok {
			ips = append(ips, local.IP.String())
		}
		_ = conn.Close() // nothing was sent
	}
	return ips
}
