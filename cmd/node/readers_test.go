package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"berth/cni"
	"berth/internal/testutil"
)

// Addresses of pods are read even if the plugin refuses a key of their configuration by now.
func TestReservationsOfEarlierConfiguration(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "pods", "10.1.2.3,fd00::3@pod@eth0")
	testutil.Must(t, os.MkdirAll(filepath.Dir(file), 0o700))
	testutil.Must(t, os.WriteFile(file, nil, 0o600))
	list := fmt.Appendf(nil, `{"cniVersion": "1.1.0", "name": "pods", "plugins": [
		{"type": "berth-net", "dataDir": %q, "subnets": ["10.1.2.0/24", "fd00::/64"], "isolation": ["pods"]}]}`, dir)
	got, err := Readers().Reservations(list)
	want := []cni.Reservation{{File: file, IP: "10.1.2.3", PodID: "pod"}, {File: file, IP: "fd00::3", PodID: "pod"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("reservations are %v, %v; want %v", got, err, want)
	}
}
