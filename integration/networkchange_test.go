package integration

import (
	"fmt"
	"strings"
	"testing"

	"berth/cni/berthnet"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// After a change from the built-in network to CNI plugins, pods of the built-in network keep it.
// Its bridge and its nftables table go with the last of them.
func TestBuiltInNetworkGoesWithItsLastPod(t *testing.T) {
	for name, restarts := range map[string]bool{"while the daemon runs": false, "while no daemon runs": true} {
		t.Run(name, func(t *testing.T) {
			const own, plugins = `network.type = "berth-net"`, `network.type = "cni"`
			d := harness.StartDaemon(t, harness.WithConfig(plugins), func(t *testing.T, d *harness.Daemon) {
				list := fixture.Conflist("test", d.DataDir, fixture.Range4)
				harness.WithNetwork(strings.ReplaceAll(list, `"berth0"`, `"cni7"`))(t, d)
			})
			t.Cleanup(func() { harness.RemoveLink(t, "cni7") })
			d.Stop(t)
			d.SetConfig(t, plugins, own)
			d.Start(t)
			installed := func() string { return strings.Join(harness.Get(berthnet.Installed(d.NetworkKey()))(t), " ") }
			first, second := d.RunPod(t), d.RunPod(t)
			c := first.Run(t)
			d.Stop(t)
			d.SetConfig(t, own, plugins)
			d.Start(t)
			other := d.RunPod(t)
			second.Remove(t)
			if !strings.Contains(c.Exec(t, "ip", "route"), "default via") {
				t.Error("the pod of the built-in network has lost its route")
			}
			for _, part := range []string{"bridge berth0", "nftables table inet berth-net-"} {
				if got := installed(); !strings.Contains(got, part) {
					t.Errorf("installed: %s, want %s", got, part)
				}
			}
			if restarts {
				first.Stop(t)
				d.Kill(t)
				d.Start(t)
			}
			first.Remove(t)
			harness.Eventually(t, "the built-in network is gone", func() error {
				if left := installed(); left != "" {
					return fmt.Errorf("%s", left)
				}
				return nil
			})
			other.Remove(t)
			d.Restart(t) // closes the plugin's sockets
		})
	}
}
