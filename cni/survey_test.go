package cni

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"berth/cni/hostlocal"
)

// What the library writes for an ADD is read back, in all versions of results.
func TestKeptResults(t *testing.T) {
	for version, result := range map[string]string{
		"0.2.0": `{"cniVersion":"0.2.0","ip4":{"ip":"192.0.2.5/24"},"ip6":{"ip":"fd00::5/64"}}`,
		"1.0.0": `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.5/24"},{"address":"fd00::5/64"}]}`,
	} {
		cache := t.TempDir()
		if _, err := addPrinted(t, cache, version, []byte(result)); err != nil {
			t.Fatal(err)
		}
		kept, err := KeptResults(cache)
		must(t, err)
		if len(kept) != 1 || kept[0].PodID != "p1" || kept[0].Network != "n" || !slices.Equal(kept[0].IPs, []string{"192.0.2.5", "fd00::5"}) {
			t.Errorf("%s: %+v", version, kept)
		}
		must(t, os.WriteFile(kept[0].File, []byte("{"), 0o600))
		kept, err = KeptResults(cache)
		must(t, err)
		if len(kept) != 1 || kept[0].PodID != "" {
			t.Errorf("a file that can't be understood: %+v", kept)
		}
	}
	if kept, err := KeptResults(t.TempDir()); err != nil || kept != nil {
		t.Errorf("without a cache: %v, %v", kept, err)
	}
}

func TestReservations(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "net"), 0o700))
	for name, content := range map[string]string{
		"192.0.2.5": "pod1\r\neth0", "fd00::5": "pod1\r\neth0", "192.0.2.6": "pod2", // as before version 0.7
		"lock": "", "last_reserved_ip.0": "192.0.2.6",
	} {
		must(t, os.WriteFile(filepath.Join(dir, "net", name), []byte(content), 0o600))
	}
	list := []byte(`{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "dataDir": "` + dir + `"}}, {"type": "portmap"}]}`)
	got, err := Reservations(list, list, nil, []byte("{"), []byte(`{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "x", "ipam": {"type": "dhcp"}}]}`))
	must(t, err)
	kept := func(ip, podID string) hostlocal.Reservation {
		return hostlocal.Reservation{File: filepath.Join(dir, "net", ip), IP: ip, PodID: podID}
	}
	want := []hostlocal.Reservation{kept("192.0.2.5", "pod1"), kept("192.0.2.6", "pod2"), kept("fd00::5", "pod1")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if !KeepsAddresses(list) || KeepsAddresses(nil) {
		t.Error("KeepsAddresses")
	}
}

func TestMayHold(t *testing.T) {
	cache, data := t.TempDir(), t.TempDir()
	must(t, os.MkdirAll(filepath.Join(cache, "results"), 0o700))
	must(t, os.MkdirAll(filepath.Join(data, "net"), 0o700))
	must(t, os.WriteFile(filepath.Join(cache, "results", "net-kept-eth0"), []byte(`{"containerId": "kept", "networkName": "net"}`), 0o600))
	must(t, os.WriteFile(filepath.Join(data, "net", "192.0.2.5"), []byte("reserved\r\neth0"), 0o600))
	for _, tt := range []struct {
		pod, netns string
		want       bool
	}{
		{"kept", "", true}, {"reserved", "", true}, {"other", "", false}, {"other", "/nonexistent", false}, {"other", cache, false}, {"other", "/proc/self/ns/net", true},
	} {
		if got, err := mayHold(cache, data, tt.pod, tt.netns); got != tt.want || err != nil {
			t.Errorf("%s with namespace %q: %t, %v", tt.pod, tt.netns, got, err)
		}
	}
	if held, err := mayHold(t.TempDir(), "/nonexistent", "kept", ""); held || err != nil {
		t.Errorf("where nothing is: %t, %v", held, err)
	}
}
