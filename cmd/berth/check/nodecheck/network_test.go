package nodecheck

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"berth/internal/host"
	"berth/sandbox/state"
)

func TestNetworkIsAskedAboutThePodCIDR(t *testing.T) {
	n := machine(t, host.Facts{}, nil)
	for file, content := range map[string]string{
		filepath.Join(n.Network.ConfDir, "1.conflist"): `{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"p","capabilities":{"ipRanges":true}}]}`,
		filepath.Join(n.Network.BinDirs[0], "p"): fmt.Sprintf("#!/bin/sh\n%s\n",
			`grep -q '"ipRanges":\[\[{"subnet":"10.1.2.0/24"}' || { echo '{"code":50,"msg":"not these addresses"}'; exit 1; }`),
	} {
		if err := os.WriteFile(file, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if f := find(t, checkNetwork(t.Context(), n), "CNI network", "not these addresses"); f.Level != Warning {
		t.Errorf("without a pod CIDR: %+v", f)
	}
	records, err := state.OpenRuntime(n.Config.Root)
	if err != nil {
		t.Fatal(err)
	}
	if err := records.Write("runtime", state.Runtime{PodCIDR: "10.1.2.0/24"}); err != nil {
		t.Fatal(err)
	}
	if f := find(t, checkNetwork(t.Context(), n), "CNI network", "pods from"); f.Level != OK {
		t.Errorf("with the pod CIDR: %+v", f)
	}
}
